"""Whole messages over one stream."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
import uvloop

from lilliput.errors import BY_CODE, BadRequest, Busy, LilliputError, TooLong, Unreachable
from lilliput.wire import channel as channel_module
from lilliput.wire import lilliput_pb2 as pb
from lilliput.wire.channel import Channel, error_message, error_of
from lilliput.wire.limits import Limits


@asynccontextmanager
async def pair(limits: Limits | None = None) -> AsyncIterator[tuple[Channel, Channel]]:
    channels = []
    for end in socket.socketpair():
        reader, writer = await asyncio.open_unix_connection(sock=end)
        channels.append(Channel(reader, writer, **({"limits": limits} if limits else {})))
    yield channels[0], channels[1]
    for channel in channels:
        channel.close()


def run(main: Coroutine[Any, Any, None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(60):
            await main

    uvloop.run(limited())


def ping(number: int) -> pb.Message:
    return pb.Message(ping=pb.Ping(id=number))


def test_messages_keep_their_order_and_their_tensors() -> None:
    async def main() -> None:
        async with pair() as (a, b):
            tensors = {"small": torch.randn(3), "large": torch.randn(300_000), "bits": torch.rand(9) > 0.5}
            a.post(ping(1))
            a.post(pb.Message(step=pb.Step(step_id=2), session=9), tensors)
            a.post(ping(3))
            first, second, third = [await b.receive() for _ in range(3)]
            assert first is not None
            assert second is not None
            assert third is not None
            assert (first.kind, second.kind, third.kind) == ("ping", "step", "ping")
            assert (first.session, second.session) == (0, 9)
            for name, tensor in tensors.items():
                assert torch.equal(second.tensors[name], tensor)

    run(main())


def test_messages_of_several_senders_do_not_mix() -> None:
    async def main() -> None:
        async with pair() as (a, b):

            async def send(number: int) -> None:
                for _ in range(5):
                    await a.send(ping(number), {"x": torch.full((200_000,), float(number))})

            senders = [asyncio.ensure_future(send(number)) for number in range(4)]
            for _ in range(20):
                received: Any = await b.expect("ping")
                assert bool((received.tensors["x"] == received.body.id).all())
            await asyncio.gather(*senders)

    run(main())


def test_the_end_of_a_stream_is_none() -> None:
    async def main() -> None:
        async with pair() as (a, b):
            a.post(ping(1))
            a.close()
            a.close()
            assert await b.receive() is not None
            assert await b.receive() is None
            assert b.gone
            with pytest.raises(Unreachable):
                await b.expect("pong")
            with pytest.raises(Unreachable):
                await a.send(ping(2))

    run(main())


def test_half_a_message_is_the_end_too() -> None:
    async def main() -> None:
        async with pair() as (a, b):
            a._writer.write(b"\0\0\0\7abc")
            a.close()
            assert await b.receive() is None

    run(main())


def test_silence_ends_the_wait_and_a_long_message_is_no_silence() -> None:
    async def main() -> None:
        async with pair() as (a, b):
            assert await b.receive(within=0.05) is None
            tensor = torch.zeros(400_000)
            header = pb.Tensor(name="x", dtype="float32", shape=[400_000], nbytes=1_600_000)
            head = pb.Message(ping=pb.Ping(id=1), tensors=[header]).SerializeToString()

            async def trickle() -> None:
                a._writer.write(len(head).to_bytes(4, "big") + head)
                for part in tensor.numpy().tobytes()[:800_000], tensor.numpy().tobytes()[800_000:]:
                    await asyncio.sleep(0.8)
                    a._writer.write(part)

            sending = asyncio.ensure_future(trickle())
            receiving = asyncio.ensure_future(b.receive(within=1.4))
            while not b.arriving:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert await receiving is not None
            assert not b.arriving
            await sending

    run(main())


def test_limits() -> None:
    limits = Limits(max_header_bytes=200, max_payload_bytes=1000, max_tensors=2)

    async def refused(message: pb.Message, tensors: dict[str, torch.Tensor], words: str, codec: str = "none") -> None:
        async with pair(limits) as (a, b):
            a.post(message, tensors, codec=codec)
            with pytest.raises(BadRequest, match=words):
                await b.receive()

    async def main() -> None:
        async with pair(limits) as (a, b):
            await a.send(ping(1), {"x": torch.zeros(100), "y": torch.zeros(150)})
            assert await b.receive() is not None
        await refused(pb.Message(step=pb.Step(parents=[1] * 300)), {}, "header")
        await refused(ping(1), {"x": torch.zeros(251)}, "1004 bytes")
        await refused(ping(1), {"x": torch.zeros(150), "y": torch.zeros(150)}, "1200 bytes")
        await refused(ping(1), dict.fromkeys("abc", torch.zeros(1)), "3 tensors")
        await refused(ping(1), {"x": torch.zeros(1001, dtype=torch.bool)}, "1001 bytes")  # 126 on the wire
        await refused(ping(1), {"x": torch.zeros(1, 251)}, "1004 bytes", "int8")  # 255 on the wire

    run(main())


def test_a_peer_that_sends_on_reads_the_last_words() -> None:
    async def main() -> None:
        async with pair() as (a, b):

            async def flood() -> None:
                for _ in range(100):
                    a._writer.write(b"\xff" * 100_000)
                    await a._writer.drain()

            flooding = asyncio.ensure_future(flood())
            with pytest.raises(BadRequest):
                await b.receive()
            b.post(error_message(TooLong("no"), closed=True))
            hearing = asyncio.ensure_future(b.hear_out())
            await flooding
            assert not hearing.done()
            with pytest.raises(TooLong):
                await a.expect("pong")
            await hearing
            assert b.gone
            assert await a.receive() is None

    run(main())


def test_last_words_that_nobody_reads_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "_HEAR_OUT_SECONDS", 0.1)

    async def main() -> None:
        async with pair() as (_, b):
            b.post(error_message(TooLong("no"), closed=True))
            await b.hear_out()
            assert not b.gone

    run(main())


@pytest.mark.parametrize(("closed", "session", "ends"), [(True, 0, True), (False, 0, False), (True, 5, False)])
def test_an_error_ends_the_stream_only_if_it_is_about_all_of_it(closed: bool, session: int, ends: bool) -> None:
    async def main() -> None:
        async with pair() as (a, b):
            a.post(error_message(TooLong("no"), closed=closed, session=session))
            a.post(ping(1))
            assert await b.receive() is not None
            assert b.gone == ends
            assert ends or (await b.expect("ping")).session == 0

    run(main())


def test_what_nobody_reads_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "_LINGER_SECONDS", 0.1)

    async def main() -> None:
        async with pair() as (a, b):
            b._reader._transport.pause_reading()  # type: ignore[attr-defined]
            for _ in range(20):
                a.post(ping(1), {"x": torch.zeros(1_000_000)})
            await asyncio.sleep(0)
            assert a.congested
            a.close()
            while a.unsent:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    run(main())


@pytest.mark.parametrize("code", BY_CODE)
def test_errors_cross_the_network(code: str) -> None:
    error = error_of(error_message(BY_CODE[code]("why")).error)
    assert type(error) is BY_CODE[code]
    assert str(error) == "why"


def test_a_busy_server_says_how_long() -> None:
    message = error_message(Busy("full", wait_seconds=2.5, queue_length=3), step_id=4, closed=True, session=5)
    error = error_of(message.error)
    assert isinstance(error, Busy)
    assert (error.wait_seconds, error.queue_length) == (2.5, 3)
    assert (message.session, message.error.step_id, message.error.closed) == (5, 4, True)
    assert message.error.retry_elsewhere


def test_a_long_error_is_cut_and_an_unknown_code_is_a_failure() -> None:
    assert len(error_message(BadRequest("x" * 10**6)).error.text) == 2000
    assert type(error_of(pb.Error(code=77, text="why"))) is not BadRequest  # type: ignore[arg-type]
    assert isinstance(error_of(pb.Error(code=77, text="why")), LilliputError)  # type: ignore[arg-type]
