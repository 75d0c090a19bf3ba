"""Who may start, and who waits in which place: pure bookkeeping."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from lilliput.errors import Busy, CacheFull, TooLong
from lilliput.server.admission import Admission, Ticket


def admission(**options: int) -> Admission:
    return Admission(**{"pages": 8, "page_size": 32, "max_length": 200, **options})


def test_pages_are_promised_for_the_whole_length() -> None:
    house = admission()
    assert [house.pages_for(1, n) for n in (1, 32, 33, 200)] == [1, 1, 2, 7]
    assert house.pages_for(4, 64) == 8
    with pytest.raises(TooLong, match="200"):
        house.pages_for(1, 201)
    with pytest.raises(CacheFull, match="256"):
        house.pages_for(5, 64)


def test_where_only_a_window_is_kept_no_more_is_promised() -> None:
    house = admission(max_length=10_000)
    assert [house.pages_for(1, n, kept=[60]) for n in (1, 64, 10_000)] == [1, 2, 3]
    assert house.pages_for(2, 10_000, kept=[60]) == 6
    with pytest.raises(CacheFull):
        house.pages_for(3, 10_000, kept=[60])


def test_first_come_first_served() -> None:
    house = admission()
    first, second = house.ask(5), house.ask(3)
    third, fourth = house.ask(3), house.ask(1)
    assert (first.granted, second.granted, third.granted, fourth.granted) == (True, True, False, False)
    house.leave(second)
    assert third.granted
    assert not fourth.granted
    house.leave(first)
    assert fourth.granted
    assert house.promised == 4


def test_nobody_is_overtaken_by_a_smaller_request() -> None:
    house = admission()
    house.ask(6)
    large = house.ask(4)
    small = house.ask(1)  # there would be room
    assert not small.granted
    house.leave(large)
    assert small.granted


def test_a_higher_bid_stands_earlier() -> None:
    house = admission()
    first = house.ask(8)
    cheap, dear, equal = house.ask(8, bid=1), house.ask(8, bid=2), house.ask(8, bid=2)
    order = []
    for _ in range(3):
        house.leave(first)
        (first,) = [t for t in (cheap, dear, equal) if t.granted and t not in order]
        order.append(first)
    assert order == [dear, equal, cheap]


def test_queue_length_is_the_number_of_sessions_that_must_finish() -> None:
    house = admission(pages=4)
    for _ in range(4):
        house.ask(1)
    assert [house.ask(1).queue_length for _ in range(3)] == [1, 2, 3]
    house = admission(pages=4)
    house.ask(4)
    assert [house.ask(2).queue_length for _ in range(4)] == [1, 1, 2, 3]  # two have room together
    house = admission(pages=4)
    house.ask(1), house.ask(3)
    assert [house.ask(4).queue_length for _ in range(2)] == [2, 3]


def test_everyone_whose_place_changes_is_called_once() -> None:
    house, calls = admission(pages=2), Counter[str]()
    running = [house.ask(1, changed=lambda: calls.update(["running"])) for _ in range(2)]
    waiting = [house.ask(1, changed=lambda n=n: calls.update([n])) for n in "abc"]
    assert not calls
    house.leave(running[0])
    assert calls == {"a": 1, "b": 1, "c": 1}
    house.leave(waiting[1])  # b gives up
    assert calls == {"a": 1, "b": 1, "c": 2}
    house.ask(1, bid=1, changed=lambda: calls.update(["rich"]))
    assert calls == {"a": 1, "b": 1, "c": 3}
    assert waiting[2].queue_length == 2


def test_asking_without_queueing_disturbs_nobody() -> None:
    house, calls = admission(), []
    house.ask(8)
    house.ask(8, changed=lambda: calls.append(1))
    with pytest.raises(Busy) as refusal:
        house.ask(1, bid=5, queue=False)
    assert refusal.value.queue_length == 1
    with pytest.raises(Busy) as refusal:
        house.ask(1, queue=False)
    assert refusal.value.queue_length == 2
    assert not calls


def test_a_bid_above_those_who_wait_starts_at_once_where_there_is_room() -> None:
    house = admission()
    house.ask(6)
    house.ask(4)
    assert house.ask(2, bid=1, queue=False).granted
    assert not house.ask(1, bid=1).granted


def test_a_full_queue() -> None:
    house = admission(max_queue=2)
    running = house.ask(8)
    house.ask(8), house.ask(8)
    with pytest.raises(Busy, match="queue") as refusal:
        house.ask(1)
    assert refusal.value.queue_length == 3
    house.leave(running)
    house.ask(1)


def test_one_peer_may_have_so_many() -> None:
    house = admission(max_sessions_per_peer=2)
    first = house.ask(8, peer="a")
    house.ask(8, peer="a")
    with pytest.raises(Busy, match="2 sessions"):
        house.ask(1, peer="a")
    assert not house.ask(1, peer="b").granted
    house.leave(first)
    house.ask(1, peer="a")


def test_a_longer_session_where_there_is_room_and_nobody_waits() -> None:
    house = admission()
    first, second = house.ask(3), house.ask(3)
    assert house.extend(first, 5)
    assert house.promised == 8
    assert not house.extend(second, 4)
    assert house.extend(second, 2)  # not longer
    assert house.promised == 8
    waiting = house.ask(1)
    house.leave(second)
    assert waiting.granted
    house.ask(8)
    assert not house.extend(first, 6)


class Life(RuleBasedStateMachine):
    """Whatever happens: never more promises than pages, the queue in order, its head without room."""

    def __init__(self) -> None:
        super().__init__()
        self.house = admission(max_queue=6)
        self.tickets: list[Ticket] = []
        self.calls: list[Ticket] = []

    @rule(pages=st.integers(1, 8), bid=st.sampled_from([-1.0, 0.0, 0.0, 1.0]), queue=st.booleans())
    def ask(self, pages: int, bid: float, queue: bool) -> None:
        before = [(t.granted, t.queue_length) for t in self.tickets]
        try:
            ticket = self.house.ask(pages, bid=bid, queue=queue, changed=lambda: self.calls.append(ticket))
        except Busy as e:
            refusal: Busy | None = e
        else:
            refusal = None
            self.tickets.append(ticket)
        if refusal is not None:
            assert refusal.queue_length
            assert not queue or self.house.waiting == 6
            assert before == [(t.granted, t.queue_length) for t in self.tickets]
        else:
            assert self.tickets[-1].granted or queue
        self.check_calls(before)

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        ticket = self.tickets.pop(data.draw(st.integers(0, len(self.tickets) - 1)))
        before = [(t.granted, t.queue_length) for t in self.tickets]
        self.house.leave(ticket)
        self.house.leave(ticket)
        self.check_calls(before)

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), pages=st.integers(1, 8))
    def extend(self, data: st.DataObject, pages: int) -> None:
        ticket = data.draw(st.sampled_from(self.tickets))
        if ticket.granted:
            promised = self.house.promised
            if not self.house.extend(ticket, pages):
                assert self.house.promised == promised

    def check_calls(self, before: list[tuple[bool, int]]) -> None:
        changed = [t for t, was in zip(self.tickets, before, strict=False) if (t.granted, t.queue_length) != was]
        assert Counter(map(id, self.calls)) == Counter(map(id, changed))
        self.calls.clear()

    @invariant()
    def promises_hold(self) -> None:
        granted = [t for t in self.tickets if t.granted]
        waiting = [t for t in self.tickets if not t.granted]
        assert self.house.promised == sum(t.pages for t in granted) <= self.house.pages
        assert (self.house.running, self.house.waiting) == (len(granted), len(waiting))
        assert all(t.queue_length == 0 for t in granted)
        queue = sorted(waiting, key=lambda t: (-t.bid, self.tickets.index(t)))
        assert self.house._queue == queue
        lengths = [t.queue_length for t in queue]
        assert lengths == sorted(lengths)
        if queue:
            assert self.house.promised + queue[0].pages > self.house.pages
            assert lengths[0] >= 1

    def teardown(self) -> None:
        for ticket in list(self.tickets):
            self.house.leave(ticket)
        assert self.house.promised == self.house.waiting == 0


def test_any_order_of_coming_and_going_keeps_the_promises() -> None:
    run_state_machine_as_test(
        Life, settings=settings(max_examples=60, stateful_step_count=30, deadline=None, derandomize=True)
    )
