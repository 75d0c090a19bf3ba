"""A full server: who waits, what they are told, who comes next."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from raw_client import BLOCKS, HIDDEN, Peer, Session, Whole, assert_nothing_left, service_of, serving, wait_until

from lilliput import Server
from lilliput.errors import BadRequest, Busy
from lilliput.wire import lilliput_pb2 as pb


@pytest.fixture(scope="module")
def small(tiny_llama: Path) -> Iterator[Server]:
    """A server with room for four pages of 32 tokens, and for three who wait."""
    with serving(tiny_llama, cache_tokens=128, max_queue=3, max_sessions_per_peer=5, fair_seconds=600) as server:
        yield server


@pytest.fixture(scope="module")
def client(small: Server, whole: Whole) -> Iterator[Peer]:
    peer = Peer(small, whole)
    yield peer
    peer.stop()


@pytest.fixture(scope="module")
def other(small: Server, whole: Whole) -> Iterator[Peer]:
    peer = Peer(small, whole)
    yield peer
    peer.stop()


@pytest.fixture(autouse=True)
def _nothing_left(small: Server) -> Iterator[None]:
    yield
    assert_nothing_left(small)


def everything(peer: Peer, **fields: Any) -> Session:
    """A session that takes the whole cache."""
    return peer.session(rows=1, max_length=128, **fields)


def waiting(peer: Peer, places: int, *, max_length: int = 128, **fields: Any) -> Session:
    """A session in the queue, where so many must finish first."""
    session = peer.ask(max_length=max_length, **fields)
    info = session.expect("info")
    assert not info.accepted
    assert info.queue_length == places
    return session


def moved(session: Session, places: int) -> None:
    """The next thing that it hears: so many must finish first."""
    info = session.expect("info")
    assert (info.accepted, info.queue_length) == (places == 0, places)


def test_a_full_server_answers_with_a_queue_length_and_later_accepts(client: Peer) -> None:
    first = everything(client)
    first.go_on(20)
    second = waiting(client, 1)
    first.go_on()
    first.bye()
    moved(second, 0)
    second.go_on(128)
    second.bye()


def test_those_who_wait_are_told_how_long(small: Server, client: Peer) -> None:
    first = everything(client)
    second = client.ask(max_length=128)
    infos = [second.expect("info")]  # it waits before the third, which has a stream of its own, comes
    third = client.ask(max_length=128)
    infos.append(third.expect("info"))
    assert 0 < infos[0].start_seconds < infos[1].start_seconds < math.inf
    assert all(info.tokens_per_second > 0 for info in infos)
    for session in (first, second, third):
        session.close()


def test_first_come_first_served_and_each_change_of_place_is_told(client: Peer, other: Peer) -> None:
    first = everything(client)
    second, third, fourth = waiting(other, 1), waiting(client, 2), waiting(other, 3)
    first.bye()
    moved(second, 0)
    moved(third, 1)
    moved(fourth, 2)
    second.go_on(5)
    second.bye()
    moved(third, 0)
    moved(fourth, 1)
    third.bye()
    moved(fourth, 0)
    fourth.go_on(3)
    fourth.bye()


def test_a_higher_bid_stands_earlier(client: Peer, other: Peer) -> None:
    first = everything(client)
    cheap = waiting(client, 1, bid=1.0)
    dear = waiting(other, 1, bid=2.5)
    moved(cheap, 2)
    equal = waiting(client, 2, bid=2.5)  # as dear, but later
    moved(cheap, 3)
    for before, after in ((first, dear), (dear, equal), (equal, cheap)):
        before.bye()
        moved(after, 0)
        for session, places in {dear: [], equal: [dear], cheap: [dear, equal]}.items():
            if after in places:
                moved(session, 1 + places[::-1].index(after))
    cheap.bye()


def test_sessions_that_have_room_together_start_together(client: Peer) -> None:
    first = everything(client)
    second, third, fourth = (waiting(client, places, max_length=64) for places in (1, 1, 2))
    first.bye()
    moved(second, 0)
    moved(third, 0)
    moved(fourth, 1)
    for session in (second, third):
        session.go_on(10)
    third.bye()
    moved(fourth, 0)
    second.go_on()
    second.bye()
    fourth.bye()


@pytest.mark.parametrize("how", ["eof", "close"])
def test_leaving_while_waiting(small: Server, client: Peer, how: str) -> None:
    first = everything(client)
    second, third = waiting(client, 1), waiting(client, 2)
    second.bye() if how == "close" else second.close()
    moved(third, 1)
    assert service_of(small).admission.waiting == 1
    first.bye()
    moved(third, 0)
    third.go_on(2)
    third.bye()


def test_leaving_at_the_moment_of_acceptance(small: Server, client: Peer) -> None:
    for _ in range(10):
        first = everything(client)
        second, third = waiting(client, 1), waiting(client, 2)
        first.close()
        second.close()
        while not third.expect("info").accepted:
            pass
        third.go_on()
        third.bye()
        wait_until(lambda: not service_of(small).admission.promised)


def test_those_who_wait_may_ping_and_nothing_else(client: Peer) -> None:
    first = everything(client)
    second = waiting(client, 1)
    second.ping()
    refusal = second.refused(torch.randn(1, 1, HIDDEN))
    assert isinstance(refusal, BadRequest)
    second.send(pb.Message(open=pb.Open(start=0, end=1, rows=1, max_length=8)))
    assert isinstance(second.error(), BadRequest)
    second.ping()
    first.bye()
    moved(second, 0)
    second.go_on(7)
    second.bye()


def test_who_does_not_want_to_wait_is_told_that_the_server_is_busy(client: Peer, other: Peer) -> None:
    first = everything(client)
    second = waiting(client, 1)
    busy = other.ask(max_length=32, no_queue=True)
    refusal: Any = busy.error()
    assert isinstance(refusal, Busy)
    assert refusal.body.closed
    assert refusal.body.retry_elsewhere
    assert refusal.queue_length == 1  # who asks for an equal share stands before who has more
    assert refusal.wait_seconds > 0
    assert busy.ended()
    # who waits has heard nothing of it, however much was offered
    rich = other.ask(max_length=32, no_queue=True, bid=100.0)
    assert isinstance(rich.error(), Busy)
    first.bye()
    moved(second, 0)
    second.bye()
    welcome = other.session(max_length=128, no_queue=True)
    welcome.bye()


def test_a_full_queue(client: Peer, other: Peer) -> None:
    first = everything(client)
    others = [waiting(client, places) for places in (1, 2, 3)]
    late = other.ask(max_length=128)
    refusal: Any = late.error()
    assert isinstance(refusal, Busy)
    assert "queue" in str(refusal)
    assert refusal.queue_length == 4
    assert refusal.wait_seconds > 0
    assert late.ended()
    for session in (first, *others):
        session.close()


def test_one_peer_may_have_so_many_sessions(client: Peer, other: Peer) -> None:
    sessions = [client.session(max_length=16) for _ in range(4)]
    sessions.append(waiting(client, 1, max_length=16))
    late = client.ask(max_length=16)
    refusal: Any = late.error()
    assert isinstance(refusal, Busy)
    assert "5" in str(refusal)
    assert late.ended()
    welcome = waiting(other, 1, max_length=16)
    moved(sessions[4], 2)
    sessions[0].bye()
    moved(welcome, 0)
    moved(sessions[4], 1)
    for session in (*sessions[1:], welcome):
        session.close()


def test_sessions_of_one_stream_queue_one_by_one(client: Peer) -> None:
    stream = client.stream()
    for number in (1, 2, 3):
        stream.send(pb.Message(open=pb.Open(start=0, end=BLOCKS, rows=1, max_length=128), session=number))

    def heard(*places: tuple[int, int]) -> None:
        infos: list[Any] = [stream.receive() for _ in places]
        assert {(info.session, info.body.queue_length) for info in infos} == set(places)
        assert all(info.body.accepted == (info.body.queue_length == 0) for info in infos)

    heard((1, 0), (2, 1), (3, 2))
    stream.send(pb.Message(close=pb.Close(), session=1))
    heard((2, 0), (3, 1))
    stream.send(pb.Message(close=pb.Close(), session=2))
    heard((3, 0))
    stream.close()


def test_extending_does_not_overtake_those_who_wait(client: Peer) -> None:
    first = client.session(max_length=64)
    first.go_on(3)
    second = waiting(client, 1, max_length=96)
    refusal = first.refused(torch.randn(1, 1, HIDDEN), max_length=96)
    assert "room" in str(refusal)
    first.go_on()
    second.close()
    wait_until(lambda: service_of(client.server).admission.waiting == 0)
    first.go_on(1, max_length=96)
    first.bye()
