"""What goes wrong with a request, in the shape in which OpenAI's API says so."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from lilliput.errors import (
    Busy,
    CacheFull,
    LilliputError,
    MissingAdapter,
    MissingBlocks,
    ModelError,
    RequestError,
    SwarmError,
)
from lilliput.gateway.visit import visit_here

logger = logging.getLogger(__name__)

#: after so many seconds a swarm that cannot answer now is worth another try
_RETRY_SECONDS = 5
#: for programs, where nothing more exact is known
_CODES = {400: "invalid_value", 408: "request_timeout", 415: "unsupported_media_type"}


class Problem(Exception):
    """An error for whoever sent a request.

    :param status: of HTTP
    :param kind: OpenAI's `type`: invalid_request_error, authentication_error, rate_limit_error, server_error
    :param param: the part of the request that is wrong
    :param code: for programs
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.kind, self.param = message, status, kind, param
        self.code = code or _CODES.get(status)
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def unsupported(message: str, param: str) -> Problem:
    """A request that is right, for something that is not to be had here."""
    return Problem(message, param=param, code="unsupported_value")


def nobody_there() -> Problem:
    """No peer of the swarm answers, or none has ever done."""
    return _later("Nobody in the swarm answers this API.", "swarm_unreachable")


def problem_of(error: BaseException) -> Problem:
    """What to say about any error. Of those that are not the client's fault, the details go to the log only."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, RequestError | ModelError):
        return Problem(str(error), code="invalid_request")
    if isinstance(error, MissingAdapter):
        return Problem(
            "The swarm has no such adapter for all of this model's blocks.",
            status=404,
            param="model",
            code="model_not_found",
        )
    if isinstance(error, MissingBlocks):
        return _later("The swarm cannot serve this model now: some of its blocks have no server.", "missing_blocks")
    if isinstance(error, Busy | CacheFull):
        seconds = getattr(error, "wait_seconds", None)
        return _later("The swarm's servers are full.", "overloaded", seconds)
    visit = visit_here.get()
    named = {"request_id": visit.id} if visit else {}
    if isinstance(error, SwarmError):
        logger.warning("a request failed", exc_info=error, extra=named)
        return _later("A server of the swarm was lost in the middle of this request.", "server_lost")
    logger.error("a request failed", exc_info=error, extra=named)
    if isinstance(error, LilliputError):
        return _later("A server of the swarm failed.", "server_failed")
    return Problem("This is an error of the gateway itself; its log says more.", status=500, kind="server_error")


def _later(message: str, code: str, seconds: float | None = None) -> Problem:
    wait = str(max(1, math.ceil(seconds or _RETRY_SECONDS)))
    return Problem(message, status=503, kind="server_error", code=code, headers={"Retry-After": wait})
