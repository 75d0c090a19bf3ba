"""What runs in the next round: pure functions."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from lilliput.engine.fairness import PeerTurns
from lilliput.engine.scheduler import (
    PATIENCE,
    WAIT_SLICE,
    Absent,
    Budget,
    Waiting,
    leading,
    plan_round,
    worth_waiting,
)

BUDGET = Budget(alone=100, beside_decode=30)


def step(
    tokens: int,
    *,
    rows: int = 1,
    bid: float = 0.0,
    at: float = 0.0,
    part: int = 6,
    whole: bool = False,
    peer: str = "",
    had: int = 0,
    led: int = 0,
) -> Waiting:
    return Waiting(0, part, rows, tokens, bid, at, whole, peer, had, led)


def test_nothing_waits() -> None:
    assert plan_round([], BUDGET) == {}


def test_all_decode_steps_run_together() -> None:
    assert plan_round([step(1, at=n) for n in range(50)], BUDGET) == dict.fromkeys(range(50), 1)


def test_a_prefix_alone_gets_the_large_budget_and_beside_others_the_small_one() -> None:
    assert plan_round([step(1000)], BUDGET) == {0: 100}
    assert plan_round([step(1000), step(1, at=1)], BUDGET) == {0: 30, 1: 1}


def test_the_oldest_prefix_is_first_and_a_higher_bid_before_it() -> None:
    assert plan_round([step(70, at=2), step(70, at=1)], BUDGET) == {1: 70, 0: 30}
    assert plan_round([step(70, at=2, bid=1), step(70, at=1)], BUDGET) == {0: 70, 1: 30}


def test_rows_share_the_budget() -> None:
    assert plan_round([step(1000, rows=7)], BUDGET) == {0: 14}


def test_one_with_more_rows_than_the_budget_moves_on_all_the_same() -> None:
    wide = step(10, rows=200)
    assert plan_round([wide], BUDGET) == {0: 1}
    assert plan_round([wide, step(1, at=1)], BUDGET) == {0: 1, 1: 1}
    assert plan_round([wide, step(10, at=1)], BUDGET) == {0: 1}


def test_a_step_that_must_be_computed_in_one_piece_is() -> None:
    assert plan_round([step(500, whole=True)], BUDGET) == {0: 500}
    assert plan_round([step(500, whole=True), step(1, at=1)], BUDGET) == {0: 500, 1: 1}
    assert plan_round([step(60), step(500, at=1, whole=True)], BUDGET) == {0: 60}  # its turn comes
    assert plan_round([step(60), step(40, at=1, whole=True)], BUDGET) == {0: 60, 1: 40}


def test_a_round_runs_one_part_of_the_span_that_of_the_oldest_step() -> None:
    steps = [step(1, part=3, at=5), step(1, at=4), step(50, part=3, at=6), step(50, at=7)]
    assert plan_round(steps, BUDGET) == {1: 1, 3: 30}


def test_a_peer_that_brings_much_comes_after_one_that_brings_little_whatever_it_bids() -> None:
    greedy = [step(90, at=n, bid=1e9, peer="greedy") for n in range(20)]
    other = step(95, at=50, peer="other")
    assert plan_round([*greedy, other], BUDGET) == {0: 90, 20: 10}  # the first of each, then the others
    greedy = [replace(waiting, prefix_tokens=90) for waiting in greedy]
    assert plan_round([*greedy, other], BUDGET) == {20: 95, 0: 5}
    # a short one is not kept waiting by a long one that has begun
    assert plan_round([step(5000, peer="greedy", had=700), step(10, at=9, peer="other", had=700)], BUDGET) == {
        1: 10,
        0: 90,
    }


def test_prefixes_as_long_as_each_other_come_one_after_the_other() -> None:
    """Side by side, all would finish late, and none of them earlier."""
    turns = PeerTurns()
    left = {name: 250 for name in "abc"}
    order = []
    while left:
        names = list(left)
        steps = [
            step(left[n], at="abc".index(n), peer=n, had=turns.prefix_tokens(n), led=turns.last_led(n)) for n in names
        ]
        plan = plan_round(steps, BUDGET)
        turns.count(steps, plan)
        for i, tokens in plan.items():
            left[names[i]] -= tokens
            if not left[names[i]]:
                order.append(names[i])
                del left[names[i]]
    assert order == ["a", "b", "c"]


def test_who_comes_back_is_owed_nothing_and_owes_nothing() -> None:
    turns = PeerTurns()

    def had(peer: str, tokens: int) -> None:
        turns.count([step(tokens, peer=peer)], {0: tokens})

    for _ in range(100):
        had("greedy", 100)
    assert turns.prefix_tokens("new") == 9900
    assert turns.prefix_tokens("greedy") == 10_000
    had("new", 50)
    assert turns.prefix_tokens("new") == 9950
    for number in range(5000):
        had(f"peer {number}", 2)
    assert len(turns._last_led) + len(turns._prefix_tokens) < 2100


def test_a_peer_that_asks_for_many_parts_of_the_span_gets_one_turn_of_each_as_the_others_do() -> None:
    greedy = [step(1000, part=part, at=0, peer="greedy", led=7) for part in range(1, 6)]
    assert plan_round([*greedy, step(1, at=99, peer="other", led=6)], BUDGET) == {5: 1}
    assert plan_round([*greedy, step(1, at=99, peer="other", led=8)], BUDGET) == {0: 100}


def test_more_rows_than_a_round_takes_are_taken_from_all_peers() -> None:
    budget = Budget(alone=100, beside_decode=30, decode=8)
    greedy = [step(1, rows=4, at=n, peer="greedy") for n in range(50)]
    others = [step(1, at=90 + n, peer=f"other {n}") for n in range(5)]
    assert set(plan_round([*greedy, *others], budget)) == {0, 50, 51, 52, 53}  # and the last one in the next round


waiting = st.builds(
    Waiting,
    start=st.just(0),
    end=st.sampled_from([3, 6]),
    rows=st.integers(1, 150),
    tokens=st.integers(1, 300),
    bid=st.sampled_from([0.0, 1.0]),
    arrived=st.floats(0, 10),
    whole=st.booleans(),
    peer=st.sampled_from("ab"),
    prefix_tokens=st.integers(0, 500),
    last_led=st.integers(0, 2),
)


@given(st.lists(waiting, max_size=12))
def test_any_round(steps: list[Waiting]) -> None:
    plan = plan_round(steps, BUDGET)
    if not steps:
        return
    part = [i for i, w in enumerate(steps) if w.end == steps[leading(steps)].end]
    assert set(plan) <= set(part)
    assert all(1 <= tokens <= steps[i].tokens for i, tokens in plan.items())
    assert all(plan[i] == 1 for i in part if steps[i].is_decode)
    assert all(plan[i] == steps[i].tokens for i in plan if steps[i].whole)
    prefixes = [i for i in part if not steps[i].is_decode]
    assert not prefixes or any(i in plan for i in prefixes)  # progress, whatever else waits
    budget = BUDGET.beside_decode if any(steps[i].is_decode for i in part) else BUDGET.alone
    spent = [steps[i].rows * plan[i] for i in prefixes if i in plan]
    assert sum(spent) <= budget or len(spent) == 1 or sum(spent) - max(spent) < budget


@given(st.lists(waiting, min_size=1, max_size=8))
def test_everything_is_computed_in_the_end(steps: list[Waiting]) -> None:
    left = dict(enumerate(steps))
    for _ in range(10_000):
        if not left:
            return
        keys = list(left)
        for index, tokens in plan_round(list(left.values()), BUDGET).items():
            w = left.pop(keys[index])
            if w.tokens > tokens:
                left[keys[index]] = replace(w, tokens=w.tokens - tokens)
    raise AssertionError("somebody starves")


def test_waiting_for_those_who_are_about_to_come_back() -> None:
    def wait(*absent: Absent, now: float = 0.002, first: float = 0.0, seconds: float = 0.02) -> float:
        return worth_waiting(absent, now=now, first_arrived=first, round_seconds=seconds)

    due = Absent(left=-0.01, away=0.012)
    assert wait(due) == WAIT_SLICE
    assert wait() == 0
    assert wait(Absent(left=-0.01, away=1.0)) == 0  # comes much later
    assert wait(Absent(left=-5.0, away=0.01)) == 0  # should have come long ago
    assert wait(due, now=0.02 * PATIENCE + 1e-6) == 0  # the first has waited long enough
    assert 0 < wait(Absent(left=-0.01, away=0.016), now=0.02 * PATIENCE - 1e-4) <= 1.1e-4
