"""What runs in the next round: pure functions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lilliput.engine.scheduler import PATIENCE, WAIT_SLICE, Absent, Budget, Waiting, plan_round, worth_waiting

BUDGET = Budget(alone=100, beside_decode=30)


def step(
    tokens: int, *, rows: int = 1, bid: float = 0.0, at: float = 0.0, part: int = 6, whole: bool = False
) -> Waiting:
    return Waiting(0, part, rows, tokens, bid, at, whole)


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


waiting = st.builds(
    Waiting,
    start=st.just(0),
    end=st.sampled_from([3, 6]),
    rows=st.integers(1, 150),
    tokens=st.integers(1, 300),
    bid=st.sampled_from([0.0, 1.0]),
    arrived=st.floats(0, 10),
    whole=st.booleans(),
)


@given(st.lists(waiting, max_size=12))
def test_any_round(steps: list[Waiting]) -> None:
    plan = plan_round(steps, BUDGET)
    if not steps:
        return
    oldest = min(steps, key=lambda w: w.arrived)
    part = [i for i, w in enumerate(steps) if w.end == oldest.end]
    assert set(plan) <= set(part)
    assert all(1 <= tokens <= steps[i].tokens for i, tokens in plan.items())
    assert all(plan[i] == 1 for i in part if steps[i].is_decode)
    assert all(plan[i] == steps[i].tokens for i in plan if steps[i].whole)
    prefixes = sorted((i for i in part if not steps[i].is_decode), key=lambda i: (-steps[i].bid, steps[i].arrived))
    if prefixes:
        assert prefixes[0] in plan  # progress, whatever else waits
    budget = BUDGET.beside_decode if any(steps[i].is_decode for i in part) else BUDGET.alone
    spent = [steps[i].rows * plan[i] for i in prefixes if i in plan]
    assert sum(spent) <= max(budget, spent[0] if spent else 0)


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
                left[keys[index]] = Waiting(w.start, w.end, w.rows, w.tokens - tokens, w.bid, w.arrived, w.whole)
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
