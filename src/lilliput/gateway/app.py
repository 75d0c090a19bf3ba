"""The HTTP application: paths, and errors in the API's shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp

from lilliput.errors import LilliputError
from lilliput.gateway.delivery import Events, Json, Whole, refusal
from lilliput.gateway.door import Door
from lilliput.gateway.keys import Keys
from lilliput.gateway.metrics import Counted
from lilliput.gateway.pages import Page
from lilliput.gateway.problems import Problem, problem_of
from lilliput.gateway.requests import ChatRequest, CompletionRequest
from lilliput.gateway.service import Job, Service
from lilliput.gateway.visits import Visits


class ErrorDetails(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """What every request gets that fails."""

    error: ErrorDetails


_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in (400, 401, 404, 408, 413, 415, 429, 500, 503)
}
_EVENTS: dict[str, Any] = {"description": "The answer; with `stream`, as server-sent events", "content": {
    "application/json": {}, "text/event-stream": {}}}  # fmt: skip


#: headers of answers that pages of other origins may read
_EXPOSED = ("X-Request-Id", "Retry-After", "Server-Timing")
#: a path is shown up to here
_SHOWN = 200


def make_app(service: Service, keys: Keys | None = None, origins: Sequence[str] = ()) -> ASGIApp:
    """The application.

    :param keys: of which requests to /v1 must bring one; by default everyone may ask
    :param origins: whose pages browsers may let ask, such as https://chat.example, or `*` for all; others' may not
    """
    keys = keys or Keys()
    service.model.metrics.watch(keys.accounts)
    app = FastAPI(title="Lilliput", description="A model in a swarm, as OpenAI's clients expect it", docs_url=None,
                  redoc_url=None, default_response_class=Json)  # fmt: skip
    door: ASGIApp = Door(app, keys)
    if origins:  # before the door: a browser asks whether it may ask, and brings no key with that
        door = CORSMiddleware(door, allow_origins=origins, allow_methods=("GET", "POST"), allow_headers=("*",),
                              expose_headers=_EXPOSED)  # fmt: skip
    visits = Visits(Counted(door, service.model.metrics))
    _add_api(app, service, visits)
    _add_pages(app, service)
    _add_errors(app)
    return visits


def _add_api(app: FastAPI, service: Service, visits: Visits) -> None:
    model = service.model

    def described(name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": model.created, "owned_by": "lilliput"}

    @app.get("/v1/models", responses=_ERRORS)
    async def models() -> dict[str, Any]:
        adapted = [f"{model.name}:{adapter}" for adapter in await model.remote.adapters()]
        return {"object": "list", "data": [described(name) for name in (model.name, *adapted)]}

    @app.get("/v1/models/{name:path}", responses=_ERRORS)
    async def one_model(name: str) -> dict[str, Any]:
        called = service.called(name)
        if called is not model:
            await called.max_length()  # raises if the swarm has no such adapter
        return described(called.name)

    @app.post("/v1/chat/completions", responses={200: _EVENTS, **_ERRORS})
    async def chat(request: ChatRequest, http: HttpRequest) -> Response:
        return _delivered(await service.chat(request, http.state.account), stream=request.stream)

    @app.post("/v1/completions", responses={200: _EVENTS, **_ERRORS})
    async def complete(request: CompletionRequest, http: HttpRequest) -> Response:
        return _delivered(await service.completion(request, http.state.account), stream=request.stream)

    @app.get("/v1/requests/{id:path}", responses=_ERRORS)
    async def request_seen(id: str, request: HttpRequest) -> dict[str, Any]:
        """What became of one of the last requests, and where its time went."""
        return visits.find(id, getattr(request.state, "account", None)).facts()


def _delivered(job: Job, *, stream: bool) -> Response:
    return Events(job.chunks()) if stream else Whole(job.whole())


def _add_pages(app: FastAPI, service: Service) -> None:
    chat, swarm = Page("page.html"), Page("swarm.html")

    @app.get("/", include_in_schema=False)
    async def chat_page() -> Response:
        return chat.response()

    @app.get("/swarm", include_in_schema=False)
    async def swarm_page() -> Response:
        return swarm.response()

    @app.get("/swarm.json", response_class=Json, responses={401: {"model": ErrorBody}, 503: {"model": ErrorBody}})
    async def swarm_facts(request: HttpRequest) -> Response:
        """Who holds what of the model, how fast, how busy and how far away; and the path of a new answer."""
        return await service.swarm.response(request.headers.get("accept-encoding", ""))

    @app.get("/health")
    async def health() -> dict[str, str]:
        """This process is there."""
        return {"status": "ok"}

    @app.get("/metrics", response_class=PlainTextResponse, responses={503: {"model": ErrorBody}})
    async def metrics() -> Response:
        """Numbers for Prometheus."""
        return Response(await service.metrics_page(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/ready", responses={503: {"model": ErrorBody}})
    async def ready() -> dict[str, Any]:
        """The swarm can answer: every block of the model has a server."""
        return {"status": "ready", "model": service.model.name, "max_length": await service.model.max_length()}


def _add_errors(app: FastAPI) -> None:
    async def refuse(_: HttpRequest, error: Exception) -> Response:
        return refusal(problem_of(error))

    async def refuse_invalid(_: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return refusal(_problem_of_validation(error))

    async def refuse_http(request: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        what = f"{request.method} {request.url.path[:_SHOWN]}"
        message, code = {
            400: ("The request is not JSON.", "invalid_json"),  # of those that no parser of JSON can read at all
            404: (f"There is no {what} here.", "unknown_url"),
            405: (f"There is no {what} here; that address takes another method.", "method_not_supported"),
        }.get(error.status_code, (f"{error.detail}.", None))
        return refusal(Problem(message, status=error.status_code, code=code, headers=error.headers))

    app.add_exception_handler(RequestValidationError, refuse_invalid)
    app.add_exception_handler(HTTPException, refuse_http)
    for kind in (Problem, LilliputError, Exception):
        app.add_exception_handler(kind, refuse)

    usual = app.openapi

    def openapi() -> dict[str, Any]:
        """Without the status 422, which is never sent: OpenAI's is 400."""
        description = usual()
        for path in description["paths"].values():
            for operation in path.values():
                operation.get("responses", {}).pop("422", None)
        return description

    app.openapi = openapi  # type: ignore[method-assign]


def _problem_of_validation(error: RequestValidationError) -> Problem:
    first = _telling(error.errors())
    param = _param(first["loc"][1:], error.body)
    if first["type"] == "json_invalid":
        return Problem("The request is not JSON.", code="invalid_json")
    if first["type"] == "extra_forbidden":
        return Problem(
            f"This server does not support the parameter {param!r}.", param=param, code="unsupported_parameter"
        )
    if first["type"] == "value_error":  # our own words
        return Problem(f"{first['msg'].removeprefix('Value error, ')}.", param=param, code="invalid_value")
    if len(first["loc"]) == 1:  # the body itself
        return Problem("The request has to be a JSON object.", code="invalid_json")
    where = f"Invalid value for {param!r}: " if param else ""
    return Problem(f"{where}{first['msg']}.", param=param, code="invalid_value")


def _telling(errors: Sequence[Any]) -> Any:
    """The first error; where a value may be of several kinds, the one of the kind that it comes nearest to."""

    def nearness(error: Any) -> tuple[bool, int]:
        return not error["type"].endswith("_type"), len(error["loc"])

    first = errors[0]
    if not first["type"].endswith("_type"):
        return first
    return max((error for error in errors if error["loc"][:2] == first["loc"][:2]), key=nearness)


def _param(location: Sequence[str | int], body: Any) -> str | None:
    """The place of an error in the request, without what pydantic adds to tell the kinds of a union apart."""
    place: list[str] = []
    for number, part in enumerate(location):
        if isinstance(body, dict) and (part in body or number == len(location) - 1):
            place.append(str(part))
            body = body.get(part)
        elif isinstance(body, list) and isinstance(part, int) and part < len(body):
            place.append(str(part))
            body = body[part]
    return ".".join(place) or None
