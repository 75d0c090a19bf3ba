"""Silence ends a session; a ping, a long message, or work in progress does not."""

from __future__ import annotations

import asyncio
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from raw_client import (
    BLOCKS,
    HIDDEN,
    PATIENCE,
    TOLERANCE,
    Peer,
    Session,
    Whole,
    assert_nothing_left,
    difference,
    service_of,
    serving,
    wait_until,
)

from lilliput import Server
from lilliput.errors import BadRequest, SessionExpired
from lilliput.wire import lilliput_pb2 as pb
from lilliput.wire.protocol import BACKWARD, FORWARD

FIRST, IDLE = 0.5, 0.8


@pytest.fixture(scope="module")
def hasty(tiny_llama: Path) -> Iterator[Server]:
    """A server of little patience, with room for 64 pages."""
    with serving(tiny_llama, cache_tokens=2048, first_step_seconds=FIRST, idle_seconds=IDLE) as server:
        yield server


@pytest.fixture
def soon_unheard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who reads nothing is given up soon."""
    monkeypatch.setattr("lilliput.wire.channel._HEAR_OUT_SECONDS", IDLE)


@pytest.fixture(scope="module")
def client(hasty: Server, whole: Whole) -> Iterator[Peer]:
    peer = Peer(hasty, whole)
    yield peer
    peer.stop()


@pytest.fixture(autouse=True)
def _nothing_left(hasty: Server) -> Iterator[None]:
    yield
    assert_nothing_left(hasty)


def expires(session: Session, words: str, at_least: float) -> None:
    """Nothing is sent any more: the session hears why it ends, not before its time."""
    begun = time.monotonic()
    error = session.error()
    assert time.monotonic() - begun > at_least - 0.2
    assert isinstance(error, SessionExpired)
    assert words in str(error)
    assert error.body.closed  # type: ignore[attr-defined]
    assert session.ended()


def test_no_first_step(client: Peer) -> None:
    expires(client.session(), "first step", FIRST)


def test_silence_after_some_steps(hasty: Server, client: Peer) -> None:
    session = client.session()
    session.go_on(40)
    session.go_on()
    assert service_of(hasty).engine.pool.used == 2
    expires(session, "nothing", IDLE)


def test_what_an_expired_session_held_is_for_others(client: Peer) -> None:
    first = client.session(max_length=2048)
    second = client.ask(max_length=2048)
    assert second.expect("info").queue_length == 1
    assert isinstance(first.error(), SessionExpired)
    assert second.expect("info").accepted
    second.go_on(100)
    second.bye()


def test_one_who_waited_long_still_has_the_whole_time_for_the_first_step(client: Peer) -> None:
    first = client.session(max_length=2048)
    first.go_on(3)
    second = client.ask(max_length=2048)
    assert not second.expect("info").accepted
    for _ in range(3):
        time.sleep(IDLE / 2)
        first.ping()
        second.ping()
    first.bye()
    assert second.expect("info").accepted
    expires(second, "first step", FIRST)


def test_the_queue_does_not_keep_those_who_fell_silent(client: Peer) -> None:
    first = client.session(max_length=2048)
    first.go_on(2)
    second = client.ask(max_length=2048)
    assert not second.expect("info").accepted
    end = time.monotonic() + IDLE + 0.6
    while time.monotonic() < end:
        first.ping()
        time.sleep(0.1)
    expires(second, "nothing", 0)
    first.bye()


@pytest.mark.parametrize("stepped", [False, True])
def test_pings_keep_a_session_alive(client: Peer, stepped: bool) -> None:
    session = client.session()
    if stepped:
        session.go_on(3)
    end = time.monotonic() + 1.5 * IDLE
    while time.monotonic() < end:
        session.ping()
        time.sleep(FIRST / 4)
    session.go_on()
    session.bye()


def test_a_step_under_way_is_no_silence(hasty: Server, client: Peer) -> None:
    session = client.session()
    session.go_on(3)
    gate = threading.Event()
    service_of(hasty).engine.call(gate.wait)
    hidden = torch.randn(1, 1, HIDDEN)
    session.submit(hidden)
    time.sleep(1.5 * IDLE)
    gate.set()
    session.output()
    session.remember(hidden)
    session.go_on()
    expires(session, "nothing", IDLE)


def test_a_long_message_on_its_way_is_no_silence(client: Peer, whole: Whole) -> None:
    """A prefix over a slow line takes longer to arrive than a client may be silent."""
    session = client.session(max_length=2048)
    hidden = torch.randn(1, 2048, HIDDEN, dtype=torch.float64)
    tensor = pb.Tensor(name="hidden", dtype="float64", shape=hidden.shape, nbytes=hidden.numel() * 8)
    head = pb.Message(step=pb.Step(step_id=1), tensors=[tensor]).SerializeToString()
    data = struct.pack("!I", len(head)) + head + hidden.numpy().tobytes()
    for part in range(0, len(data), 1 << 18):
        session.send_bytes(data[part : part + (1 << 18)])
        time.sleep(FIRST * 0.7)
    _, output = session.output()
    session.bye()  # at once: comparing may take longer than it may be silent
    assert difference(output, whole(hidden.float())) < TOLERANCE


def test_half_a_message_and_then_silence(client: Peer) -> None:
    session = client.session()
    session.go_on(3)
    tensor = pb.Tensor(name="hidden", dtype="float32", shape=[1, 2048, HIDDEN], nbytes=2048 * HIDDEN * 4)
    head = pb.Message(step=pb.Step(step_id=1), tensors=[tensor]).SerializeToString()
    session.send_bytes(struct.pack("!I", len(head)) + head + bytes(400_000))
    expires(session, "nothing", 0)


def test_a_stream_on_which_nothing_is_ever_opened(client: Peer) -> None:
    stream = client.stream()
    assert isinstance(stream.error(), BadRequest)
    assert stream.ended()


def test_streams_for_passes_on_which_nothing_comes(client: Peer) -> None:
    for stream in [client.stream(handler) for handler in (FORWARD, BACKWARD)]:
        assert stream.ended()


def test_a_stream_without_sessions_is_kept_for_a_while_after_the_last(client: Peer) -> None:
    """A client that closes one session and opens another finds the stream as it was."""
    stream = client.stream()
    for number in range(1, 6):
        stream.send(pb.Message(open=pb.Open(start=0, end=BLOCKS, rows=1, max_length=32), session=number))
        assert stream.expect("info").accepted
        stream.send(pb.Message(close=pb.Close(), session=number))
        time.sleep(FIRST / 2)
    begun = time.monotonic()
    assert stream.ended()
    assert time.monotonic() - begun > 0.2


def test_one_session_expires_and_the_others_of_its_stream_do_not(client: Peer) -> None:
    stream = client.stream()
    for number in (1, 2):
        stream.send(pb.Message(open=pb.Open(start=0, end=BLOCKS, rows=1, max_length=32), session=number))
        assert stream.expect("info").accepted
    end = time.monotonic() + 1.5 * IDLE
    heard = []
    while time.monotonic() < end:
        stream.send(pb.Message(ping=pb.Ping(id=1), session=2))
        received = stream.receive()
        assert received is not None
        heard.append((received.kind, received.session))
        time.sleep(0.1)
    assert heard.count(("error", 1)) == 1
    assert {h for h in heard if h != ("error", 1)} == {("pong", 2)}
    stream.close()


@pytest.mark.usefixtures("soon_unheard")
def test_a_client_that_sends_steps_and_never_reads(hasty: Server, client: Peer) -> None:
    """Its outputs pile up to a bound, then it is not read either, then it is silent."""
    session = client.session(max_length=2048, rows=1)

    async def flood() -> None:
        session.channel._reader._transport.pause_reading()  # type: ignore[attr-defined]
        for step_id in range(1, 400):
            body = pb.Step(step_id=step_id, start_position=0)
            await session.channel.send(pb.Message(step=body), {"hidden": torch.zeros(1, 512, HIDDEN)})

    flooding = session.thread.submit(flood())
    wait_until(lambda: service_of(hasty).engine.pool.used > 0)
    wait_until(lambda: service_of(hasty).engine.pool.used == 0, PATIENCE)
    assert_nothing_left(hasty)
    flooding.cancel()
    session.close()


@pytest.mark.usefixtures("soon_unheard")
def test_a_client_that_errs_and_never_reads(hasty: Server, client: Peer) -> None:
    session = client.session()

    async def flood() -> None:
        session.channel._reader._transport.pause_reading()  # type: ignore[attr-defined]
        nothing = {"x" * 1900: torch.zeros(0)}  # is refused, and the error names it
        while True:
            for _ in range(100):
                session.channel.post(pb.Message(step=pb.Step()), nothing)
            await session.channel.drain()
            await asyncio.sleep(0)

    flooding = session.thread.submit(flood())
    assert_nothing_left(hasty)
    flooding.cancel()
    session.close()
