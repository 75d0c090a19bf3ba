"""Sends an answer that takes its time, and gives it up when nobody is there any more to read it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from lilliput.gateway.problems import Problem, problem_of

#: a reader that takes nothing for so long is gone
_STALLED_SECONDS = 60.0
_EVENTS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies shall pass each event on at once
]


class _Gone(Exception):
    """Nobody reads any more."""


def dumped(content: Any) -> bytes:
    """JSON in UTF-8, whatever may stand in a text."""
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")


class Json(JSONResponse):
    def render(self, content: Any) -> bytes:
        return dumped(content)


def refusal(problem: Problem) -> Response:
    return Json(problem.body, problem.status, headers=problem.headers)


class Whole(Response):
    """A JSON answer. If it fails, the error's."""

    def __init__(self, work: Awaitable[Any]) -> None:
        super().__init__()
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _while_connected(self._answer(scope, receive, send), receive)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response: Response = Json(await self._work)
        except Exception as e:
            response = refusal(problem_of(e))
        await response(scope, receive, send)


class Events(Response):
    """Server-sent events. An error before the first is an answer of its own; one after that is an event."""

    def __init__(self, chunks: AsyncIterator[Any]) -> None:
        super().__init__()
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _while_connected(self._answer(scope, receive, send), receive)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False
        async with contextlib.aclosing(self._chunks):  # type: ignore[type-var]
            try:
                async for chunk in self._chunks:
                    if not begun:
                        begun = True
                        await send({"type": "http.response.start", "status": 200, "headers": _EVENTS})
                    await _event(send, dumped(chunk))
                await _event(send, b"[DONE]")
            except _Gone:
                raise
            except Exception as e:
                problem = problem_of(e)
                if not begun:
                    await refusal(problem)(scope, receive, send)
                    return
                await _event(send, dumped(problem.body))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _event(send: Send, data: bytes) -> None:
    message: Message = {"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True}
    try:
        async with asyncio.timeout(_STALLED_SECONDS):
            await send(message)
    except (TimeoutError, OSError) as e:
        raise _Gone from e


async def _while_connected(work: Awaitable[None], receive: Receive) -> None:
    """Do the work; cancel it when the client hangs up."""
    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(_hung_up(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
