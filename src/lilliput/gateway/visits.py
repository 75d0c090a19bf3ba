"""Requests on their way through: each has an id, a line in the log, and for a while a record of where its time went.

The id is the caller's own `X-Request-Id`, or a new one. It is in the response's headers, in this log, and in those of
the servers that took part.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lilliput.gateway.problems import Problem
from lilliput.gateway.visit import Visit, visit_here
from lilliput.wire import request_id

logger = logging.getLogger(__name__)

HEADER = "X-Request-Id"
#: the last requests are remembered, as many as have so many answers together
_MOST_ANSWERS = 512
#: a path is shown up to here
_SHOWN = 200


class Visits:
    """Gives requests their ids, and remembers the last ones."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._last: OrderedDict[str, Visit] = OrderedDict()

    def find(self, id: str, account: object) -> Visit:
        """The last request of that id. Raises `Problem` if none is remembered that came with the same key."""
        visit = self._last.get(id)
        if visit is None or visit.state.get("account") is not account:
            raise Problem("No request of this id is remembered.", status=404, param="id", code="request_not_found")
        return visit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER, "")
        named = given if request_id.is_request_id(given) else request_id.new()
        visit = Visit(named, scope["method"], scope["path"][:_SHOWN], scope.setdefault("state", {}))

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                visit.status = message["status"]
                headers = MutableHeaders(scope=message)
                headers[HEADER] = visit.id
                if visit.answers:
                    headers["Server-Timing"] = visit.timing()
                if visit.method == "POST" and visit.status == 200:  # others could be sent to have these forgotten
                    self._remember(visit)
            await send(message)

        token = visit_here.set(visit)
        try:
            await self._app(scope, receive, noting)
        finally:
            visit_here.reset(token)
            visit.seconds = time.perf_counter() - visit.began
            _log(visit)

    def _remember(self, visit: Visit) -> None:
        self._last.pop(visit.id, None)
        self._last[visit.id] = visit
        while len(self._last) > 1 and sum(1 + len(other.answers) for other in self._last.values()) > _MOST_ANSWERS:
            self._last.popitem(last=False)


def _log(visit: Visit) -> None:
    """Questions that are asked again and again, by programs, are told only to who wants everything."""
    level = logging.INFO if visit.method == "POST" or visit.status >= 400 else logging.DEBUG
    prompt, cached, tokens = (
        sum(getattr(answer, name) for answer in visit.answers) for name in ("prompt_tokens", "cached_tokens", "tokens")
    )
    said = f", {prompt} tokens read and {tokens} written" if visit.answers else ""
    more: dict[str, object] = {}
    if visit.answers:
        more = {"prompt_tokens": prompt, "cached_tokens": cached, "tokens": tokens}
    if name := getattr(visit.state.get("account"), "name", ""):
        more["key"] = name
        said += f", with the key {name}"
    logger.log(
        level,
        "%s %s: %d after %.3f s%s",
        *(visit.method, visit.path, visit.status, visit.seconds, said),
        extra={
            "request_id": visit.id,
            "method": visit.method,
            "path": visit.path,
            "status": visit.status,
            "seconds": round(visit.seconds or 0.0, 6),
            **more,
        },
    )
