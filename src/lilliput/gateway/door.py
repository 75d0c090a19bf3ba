"""Who may come in, and with how much. It stands before everything that reads a request."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lilliput.gateway.account import Account
from lilliput.gateway.delivery import refusal
from lilliput.gateway.keys import Keys
from lilliput.gateway.problems import Problem

#: of a request, which has to arrive within so many seconds
MAX_BODY_BYTES = 8 << 20
_BODY_SECONDS = 30.0
_PROTECTED = ("/v1/", "/swarm.json")


class _HungUp(Exception):
    pass


class Door:
    """Checks the key of requests for the API, and reads bodies, which are neither endless nor endlessly slow.

    The application finds the `Account` of a request in its `state.account`.
    """

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # the server sends no body with the answer to that
            scope = {**scope, "method": "GET"}
        headers = Headers(scope=scope)
        with contextlib.ExitStack() as leaving:
            try:
                if scope["path"].startswith(_PROTECTED):
                    account = self._keys.account(headers.get("authorization", ""))
                    scope.setdefault("state", {})["account"] = account
                    if scope["method"] == "POST":  # the others cost nothing
                        leaving.enter_context(account.request())
                        send = _telling(account, send)
                if scope["method"] == "POST":
                    _check_type(headers.get("content-type", ""))
                body = await _read(headers, receive)
            except Problem as problem:
                problem.headers["Connection"] = "close"  # there may be more of the body, which nobody will read
                await refusal(problem)(scope, receive, send)
                return
            except _HungUp:
                return
            await self._app(scope, _replaying(body, receive), send)


def _telling(account: Account, send: Send) -> Send:
    """Say with every answer what the account has left."""

    async def telling(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers.update(account.headers())
        await send(message)

    return telling


def _check_type(content_type: str) -> None:
    # a form of a stranger's web page can be sent here from a browser, but it cannot have this type
    kind = content_type.partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Problem("Send JSON, with the header `Content-Type: application/json`.", status=415)


async def _read(headers: Headers, receive: Receive) -> bytes:
    declared = headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > MAX_BODY_BYTES:
        raise _too_large()
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise _HungUp
                body += message.get("body", b"")
                if len(body) > MAX_BODY_BYTES:
                    raise _too_large()
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        raise Problem(f"The request did not arrive within {_BODY_SECONDS:.0f} s.", status=408) from None


def _too_large() -> Problem:
    return Problem(f"A request may have {MAX_BODY_BYTES} bytes.", status=413, code="request_too_large")


def _replaying(body: bytes, receive: Receive) -> Receive:
    read = False

    async def replay() -> Message:
        nonlocal read
        if read:
            return await receive()
        read = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
