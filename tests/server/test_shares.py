"""One peer that wants everything beside eight that want a little."""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from raw_client import HIDDEN, Peer, Whole, assert_nothing_left, service_of, serving, wait_until

from lilliput.errors import Busy
from lilliput.server.admission import Admission
from lilliput.wire import lilliput_pb2 as pb


def house(**options: float) -> Admission:
    return Admission(**{"pages": 12, "page_size": 32, "max_length": 384, "fair_seconds": 5.0, **options})  # type: ignore[arg-type]


def test_one_peer_may_have_everything_until_others_come_and_keeps_an_equal_share() -> None:
    now = [0.0]
    admission = house(clock=lambda: now[0])  # type: ignore[arg-type]
    ended: list[int] = []
    greedy = [admission.ask(2, peer="greedy", evict=lambda i=i: ended.append(i)) for i in range(6)]  # type: ignore[misc]
    assert all(ticket.granted for ticket in greedy)
    greedy[0].used_at = 3.0
    other = admission.ask(4, peer="other")
    assert not other.granted
    assert not ended  # it has had no time yet
    now[0] = 5.0
    admission.refresh()
    assert ended == [1, 2]  # those that were not used for longest, and no more than it takes
    for i in ended:
        admission.leave(greedy[i])
    assert other.granted
    more = admission.ask(3, peer="other")  # with that it would have more than half
    admission.refresh()
    assert (more.granted, ended) == (False, [1, 2])


def test_an_equal_share_comes_before_more_than_that_whatever_is_bid() -> None:
    admission = house()
    first = admission.ask(12, peer="greedy")
    rich = admission.ask(6, peer="greedy", bid=1e9)
    poor = admission.ask(6, peer="other")
    admission.leave(first)
    assert rich.granted
    assert poor.granted
    late, early = admission.ask(4, peer="greedy", bid=1e9), admission.ask(2, peer="third")
    admission.leave(poor)
    assert early.granted
    assert late.granted


def test_a_fixed_limit_holds_even_where_nobody_waits() -> None:
    admission = house(peer_share=0.5)
    admission.ask(4, peer="greedy")
    with pytest.raises(Busy, match="192"):
        admission.ask(3, peer="greedy")
    assert admission.ask(6, peer="other").granted


def test_a_greedy_peer_keeps_its_share_and_eight_others_get_theirs(tiny_llama: Path, whole: Whole) -> None:
    """The greedy one has taken all 36 pages with long sessions before the others come; nine peers get 4 pages each."""
    rate, begun = 100_000, time.monotonic()
    with serving(tiny_llama, cache_tokens=36 * 32, fair_seconds=0.0, peer_rate=rate) as server:
        admission, counters = service_of(server).admission, service_of(server).engine.counters
        peers = [Peer(server, whole) for _ in range(9)]
        greedy, *others = peers
        try:
            taken = [greedy.session(max_length=64) for _ in range(18)]
            assert admission.free_tokens == 0
            for session in taken[-2:]:
                session.go_on(10)

            sessions = [other.session(max_length=128, no_queue=True) for other in others]  # none of them is refused
            held = Counter[str]()
            for ticket in admission._running:
                held[ticket.peer] += ticket.pages
            assert held[str(greedy.node.peer_id)] == 4
            assert sorted(held.values()) == [4] * 9
            refusal = greedy.ask(max_length=32, no_queue=True).error()
            assert isinstance(refusal, Busy)
            assert refusal.wait_seconds
            for session in taken[:-2]:
                assert isinstance(session.error(), Busy)

            async def flood() -> None:
                for number in range(100, 2100):
                    step = pb.Message(step=pb.Step(step_id=number, start_position=0))
                    await taken[-1].channel.send(step, {"hidden": torch.zeros(1, 64, HIDDEN)})

            def talk(number: int) -> None:
                sessions[number].go_on(60)
                for _ in range(5):
                    sessions[number].go_on()

            before = counters.tokens
            flooding = greedy.thread.submit(flood())
            wait_until(lambda: counters.tokens > before)
            with ThreadPoolExecutor(len(others)) as pool:
                list(pool.map(talk, range(len(others))))
            assert not flooding.done()
            its_bytes = (counters.tokens - before - len(others) * 65) * HIDDEN * 4
            assert its_bytes <= rate * (2 + time.monotonic() - begun)
            flooding.cancel()
            taken.pop().close()  # with all that it has not taken yet
            taken[-1].go_on()  # what is within its share was left alone, the last used first
            for session in (*sessions, taken[-1]):
                session.bye()
            assert_nothing_left(server)
        finally:
            for peer in peers:
                peer.stop()


def test_pings_alone_do_not_keep_a_session_that_is_never_used(tiny_llama: Path, whole: Whole) -> None:
    with serving(tiny_llama, unused_seconds=0.5) as server:
        peer = Peer(server, whole)
        try:
            session = peer.session()
            while True:
                session.send(pb.Message(ping=pb.Ping(id=1)))
                received = session.receive()
                assert received is not None
                if received.kind == "error":
                    break
            assert "only pings" in received.body.text  # type: ignore[attr-defined]
            wait_until(lambda: service_of(server).admission.running == 0)
        finally:
            peer.stop()
