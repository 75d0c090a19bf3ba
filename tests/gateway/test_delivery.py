"""Errors come as a status before an answer begins and as an event after that; nobody's answer goes on without them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from starlette.types import Message

from lilliput.errors import MissingBlocks, Unreachable
from lilliput.gateway.delivery import Events

SCOPE = {"type": "http", "method": "POST", "path": "/", "headers": []}


async def sent_by(events: Events, *, hangs_up: asyncio.Event | None = None) -> list[Message]:
    sent: list[Message] = []

    async def receive() -> Message:
        await (hangs_up or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    await events(SCOPE, receive, send)
    return sent


async def failing(after: int, error: Exception) -> AsyncIterator[Any]:
    for number in range(after):
        yield {"number": number}
    raise error


def test_an_error_before_the_first_event_has_a_status() -> None:
    start, body = asyncio.run(sent_by(Events(failing(0, MissingBlocks("no server holds blocks 0:3", ((0, 3),))))))
    assert start["status"] == 503
    assert (b"retry-after", b"5") in start["headers"]
    assert json.loads(body["body"])["error"]["code"] == "missing_blocks"


def test_a_later_error_is_the_last_event_and_tells_nothing_of_the_swarm() -> None:
    start, *bodies = asyncio.run(sent_by(Events(failing(2, Unreachable("server 12D3Koo died at 192.0.2.7")))))
    assert start["status"] == 200
    events = b"".join(body["body"] for body in bodies).decode().split("\n\n")
    assert events[:2] == ['data: {"number":0}', 'data: {"number":1}']
    assert json.loads(events[2].removeprefix("data: "))["error"]["code"] == "server_lost"
    assert events[3:] == [""]
    assert "192.0.2.7" not in events[2]
    assert not bodies[-1]["more_body"]


def test_who_hangs_up_ends_it() -> None:
    async def scenario() -> bool:
        gone, ended = asyncio.Event(), False

        async def endless() -> AsyncIterator[Any]:
            nonlocal ended
            try:
                yield {}
                gone.set()
                await asyncio.sleep(60)
            finally:
                ended = True

        async with asyncio.timeout(1):
            await sent_by(Events(endless()), hangs_up=gone)
        return ended

    assert asyncio.run(scenario())
