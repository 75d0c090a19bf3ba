"""However a session ends, nothing of it is left."""

from __future__ import annotations

import asyncio
import os
import struct
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import psutil
import pytest
import torch
from raw_client import (
    BLOCKS,
    HIDDEN,
    PATIENCE,
    Peer,
    Session,
    Whole,
    assert_nothing_left,
    on_loop,
    service_of,
    serving,
    wait_until,
)

from lilliput import Server
from lilliput.engine.training import Pass
from lilliput.errors import BadRequest, Draining, LilliputError, SessionExpired
from lilliput.server import client_stream
from lilliput.wire import lilliput_pb2 as pb
from lilliput.wire.channel import Channel

HELLO = torch.ones(1, 5, HIDDEN)

pytestmark = pytest.mark.usefixtures("nothing_left")


def busy_session(peer: Peer) -> Session:
    """With rows that share pages, a page known by its key, and pages of their own."""
    session = peer.session(rows=4, max_length=256)
    hidden = torch.randn(1, 100, HIDDEN)
    session.step(hidden, hashes=os.urandom(16 * 6))
    session.remember(hidden)
    session.go_on(1, parents=[0, 0, 0])
    session.go_on(40, start_position=70)
    return session


def garbage(session: Session) -> None:
    session.send_bytes(struct.pack("!I", 1 << 30))
    assert isinstance(session.error(), BadRequest)
    assert session.ended()


ENDS: dict[str, Callable[[Session], object]] = {
    "goodbye": Session.bye,
    "no word": Session.close,
    "garbage": garbage,
    "after a refused step": lambda session: (session.refused(torch.randn(9, 9, 9)), session.bye()),
    "half a message": lambda session: (session.send_bytes(b"\0\0"), session.close()),
    "a torn connection": lambda session: session.thread.loop.call_soon_threadsafe(
        session.channel._writer.transport.abort
    ),
}


@pytest.mark.parametrize("how", ENDS)
def test_a_session_that_ends_frees_its_pages(server: Server, peer: Peer, how: str) -> None:
    session = busy_session(peer)
    assert service_of(server).engine.pool.used > 4
    ENDS[how](session)
    assert_nothing_left(server)


def test_a_session_that_never_steps(peer: Peer) -> None:
    for _ in range(20):
        peer.session().close()


def test_one_who_leaves_before_the_answer(server: Server, peer: Peer) -> None:
    for _ in range(20):
        peer.ask(max_length=2048).close()
    assert_nothing_left(server)


def test_one_who_sends_a_long_prefix_and_vanishes(server: Server, peer: Peer) -> None:
    """Before it is computed, or in the middle."""
    for _ in range(5):
        session = peer.session(max_length=1024)
        session.submit(torch.randn(1, 1024, HIDDEN))
        session.close()
    assert_nothing_left(server)


def test_steps_of_one_who_has_left_are_not_computed(server: Server, peer: Peer) -> None:
    service = service_of(server)
    session = peer.session(max_length=2048)
    session.go_on(3)
    gate = threading.Event()
    service.engine.call(gate.wait)
    tokens = service.engine.counters.tokens
    for _ in range(3):
        session.submit(torch.randn(1, 600, HIDDEN))
    session.ping()
    session.close()
    wait_until(lambda: not service.streams)
    gate.set()
    assert_nothing_left(server)
    assert service.engine.counters.tokens == tokens


def test_one_who_leaves_between_two_slices_of_a_prefix(server: Server, peer: Peer) -> None:
    service = service_of(server)
    engine, gate, first = service.engine, threading.Event(), threading.Event()
    compute = engine._compute

    def slowly(slices: list) -> None:  # type: ignore[type-arg]
        compute(slices)
        first.set()
        gate.wait(PATIENCE)

    session = peer.session(max_length=2048)
    tokens = engine.counters.tokens
    engine._compute = slowly  # type: ignore[method-assign]
    try:
        session.submit(torch.randn(1, 1024, HIDDEN))
        assert first.wait(PATIENCE)
        assert engine.pool.used == 32
        session.close()
        wait_until(lambda: not service.streams)
    finally:
        engine._compute = compute  # type: ignore[method-assign]
        gate.set()
    assert_nothing_left(server)
    assert engine.counters.tokens - tokens == engine.budget.alone


def test_a_client_is_not_read_while_much_of_it_waits(
    server: Server, peer: Peer, stranger: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its steps are bounded in number and, over all its streams, in bytes. All are answered in the end."""
    service = service_of(server)
    monkeypatch.setattr(client_stream, "_IN_FLIGHT_BYTES", 100_000)
    large, more, many = peer.session(max_length=2048), peer.session(), stranger.session()
    gate = threading.Event()
    service.engine.call(gate.wait)
    for _ in range(6):
        large.submit(torch.randn(1, 200, HIDDEN), start_position=0)  # 51 kB
    wait_until(lambda: sorted(stream._in_flight for stream in service.streams) == [0, 0, 2])
    for _ in range(20):
        many.submit(torch.randn(1, 1, HIDDEN), start_position=0)
        more.submit(torch.randn(1, 1, HIDDEN), start_position=0)
    wait_until(lambda: sorted(stream._in_flight for stream in service.streams) == [1, 2, 8])
    gate.set()
    for session, count in ((large, 6), (more, 20), (many, 20)):
        for _ in range(count):
            session.output()
        session.bye()


def test_many_come_and_go(server: Server, peer: Peer, stranger: Peer) -> None:
    for number in range(30):
        session = (peer, stranger)[number % 2].session(number % 3, BLOCKS - number % 2, rows=1 + number % 3)
        session.go_on(1 + number, rows=1 + number % 3)
        (session.bye, session.close)[number % 2]()
    assert_nothing_left(server)


# ---- the server leaves ----


def test_a_server_that_stops_tells_its_sessions_and_leaves_nothing(tiny_llama: Path, whole: Whole) -> None:
    daemons = set(psutil.Process().children())
    with serving(tiny_llama, cache_tokens=512) as server:
        peer = Peer(server, whole)
        stepped = peer.session(max_length=256)
        stepped.go_on(40)
        accepted = peer.session(max_length=256)
        waiting = peer.ask(max_length=256)
        assert not waiting.expect("info").accepted
        service = service_of(server)
        gate = threading.Event()
        service.engine.call(gate.wait)  # in the middle of a long round
        stopping = threading.Thread(target=server.shutdown)
        stepped.submit(torch.randn(1, 3, HIDDEN))
        stepped.ping()
        stopping.start()
        for session in (stepped, accepted, waiting):
            error: LilliputError = session.error()
            assert isinstance(error, Draining)
            assert error.body.closed  # type: ignore[attr-defined]
            assert error.body.retry_elsewhere  # type: ignore[attr-defined]
            assert session.ended()
        gate.set()
        stopping.join(PATIENCE)
        assert not server.is_alive()
        assert not server.ready.is_set()
        assert service.engine.pool.used == 0
        # whoever comes too late is not left waiting
        result: Future[object] = Future()
        service.engine.run_pass(Pass(0, BLOCKS, torch.randn(1, 2, HIDDEN), done=result.set_result))
        assert isinstance(result.result(PATIENCE), SessionExpired)
        assert service.engine.call(lambda: 7).result(PATIENCE) == 7
        peer.stop()
    wait_until(lambda: not {c for c in psutil.Process().children() if c.is_running()} - daemons)


def test_one_who_is_sending_when_the_server_leaves_reads_why_once(server: Server, peer: Peer) -> None:
    service = service_of(server)

    async def leave() -> None:
        for stream in list(service.streams):
            stream.end(Draining("leaving"))

    for _ in range(10):
        session = peer.session()

        async def flood(channel: Channel = session.channel) -> None:
            for step_id in range(1, 200):
                channel.post(pb.Message(step=pb.Step(step_id=step_id, start_position=0)), {"hidden": HELLO})
                if step_id % 10 == 0:
                    await asyncio.sleep(0)

        flooding = peer.thread.submit(flood())
        assert session.receive() is not None
        on_loop(server, leave)
        flooding.result(PATIENCE)
        heard = []
        while (received := session.receive()) is not None:
            heard.append(received)
        assert [r.kind for r in heard].index("error") == len(heard) - 1
        assert heard[-1].body.text == "leaving"  # type: ignore[attr-defined]
        session.close()


def test_a_draining_server_takes_nothing_new(server: Server, peer: Peer) -> None:
    service = service_of(server)
    session = peer.session()
    session.go_on(3)
    service.draining = True
    try:
        late = peer.ask()
        assert isinstance(late.error(), Draining)
        assert late.ended()
        session.go_on(2)  # who is here goes on until told otherwise
    finally:
        service.draining = False
    session.bye()


def test_a_server_stops_although_a_client_does_not_read(tiny_llama: Path, whole: Whole) -> None:
    with serving(tiny_llama, cache_tokens=2048) as server:
        peer = Peer(server, whole)
        session = peer.session(max_length=2048)

        async def flood() -> None:
            session.channel._reader._transport.pause_reading()  # type: ignore[attr-defined]
            for step_id in range(1, 200):
                body = pb.Step(step_id=step_id, start_position=0)
                await session.channel.send(pb.Message(step=body), {"hidden": torch.zeros(1, 512, HIDDEN)})

        flooding = peer.thread.submit(flood())
        wait_until(lambda: service_of(server).engine.counters.steps > 20)
        server.shutdown(PATIENCE)
        assert not server.is_alive()
        flooding.cancel()
        peer.stop()
