"""A session's bookkeeping: rows, pages, rollback, copies."""

from __future__ import annotations

import pytest
import torch

from lilliput.engine.pages import PagePool
from lilliput.engine.session import CacheSession, Step, StepOutput
from lilliput.errors import BadRequest, TooLong
from lilliput.models.paged_cache import Group

SIZE, HIDDEN = 16, 8


def begin(session: CacheSession, rows: int, tokens: int, **options: object) -> Step:
    """Begin a step and pretend that it was computed."""
    step = Step(torch.zeros(rows, tokens, HIDDEN), **options)  # type: ignore[arg-type]
    session.begin(step, HIDDEN, torch.float32)
    session.length += tokens
    step.offset = tokens
    session.finish(step)
    session.copies.clear()
    session.fresh.clear()
    return step


def pages(session: CacheSession) -> list[list[int]]:
    return session.tables[0].rows


@pytest.fixture
def pool() -> PagePool:
    return PagePool(40, SIZE)


@pytest.fixture
def session(pool: PagePool) -> CacheSession:
    return CacheSession(pool, 0, 2, [Group((0, 1))], rows=4, max_length=100)


def test_pages_are_taken_as_they_fill(pool: PagePool, session: CacheSession) -> None:
    for tokens, used in ((1, 2), (15, 2), (1, 4), (40, 8)):
        begin(session, 2, tokens)
        assert pool.used == used
    session.close()
    session.close()
    assert pool.used == 0


def test_new_pages_are_named_for_clearing_and_only_those(session: CacheSession) -> None:
    step = Step(torch.zeros(2, 20, HIDDEN))
    session.begin(step, HIDDEN, torch.float32)
    assert sorted(session.fresh) == sorted(page for row in pages(session) for page in row)
    session.length, step.offset = 20, 20
    session.fresh.clear()
    session.begin(Step(torch.zeros(2, 1, HIDDEN)), HIDDEN, torch.float32)
    assert not session.fresh


def test_rows_with_one_parent_share_until_they_write(pool: PagePool, session: CacheSession) -> None:
    begin(session, 1, 40)
    first = list(pages(session)[0])
    step = Step(torch.zeros(3, 1, HIDDEN), parents=[0, 0, 0])
    session.begin(step, HIDDEN, torch.float32)
    rows = pages(session)
    assert all(row[:2] == first[:2] for row in rows)
    assert len({row[2] for row in rows}) == 3
    assert [source for source, _ in session.copies] == [first[2]] * 2  # the last one keeps the page itself
    assert {target for _, target in session.copies} == {row[2] for row in rows} - {first[2]}
    assert not session.fresh
    assert pool.used == 5


def test_permuted_rows_move_no_data(pool: PagePool, session: CacheSession) -> None:
    begin(session, 3, 40)
    before = [list(row) for row in pages(session)]
    step = Step(torch.zeros(3, 1, HIDDEN), parents=[2, 0, 1])
    session.begin(step, HIDDEN, torch.float32)
    assert pages(session) == [before[2], before[0], before[1]]
    assert not session.copies
    assert pool.used == 9


def test_rollback_gives_back_whole_pages(pool: PagePool, session: CacheSession) -> None:
    begin(session, 2, 60)
    assert pool.used == 8
    begin(session, 2, 1, start_position=32)
    assert (pool.used, session.length) == (6, 33)
    begin(session, 2, 1, start_position=31)
    assert (pool.used, session.length) == (4, 32)
    begin(session, 4, 3, start_position=0)
    assert (pool.used, session.length, session.rows) == (4, 3, 4)
    pool.check()


def test_a_refused_step_changes_nothing(pool: PagePool, session: CacheSession) -> None:
    begin(session, 2, 40)
    before = [list(row) for row in pages(session)]
    bad = Step(torch.full((2, 1, HIDDEN), torch.nan), parents=[1, 1], start_position=3)
    with pytest.raises(BadRequest):
        session.begin(bad, HIDDEN, torch.float32)
    with pytest.raises(TooLong):
        session.begin(Step(torch.zeros(2, 98, HIDDEN), start_position=3), HIDDEN, torch.float32)
    assert pages(session) == before
    assert (session.length, pool.used) == (40, 6)


def test_an_abandoned_step_is_forgotten_and_its_traces_are_named(pool: PagePool, session: CacheSession) -> None:
    begin(session, 2, 20)
    step = Step(torch.zeros(2, 30, HIDDEN))
    session.begin(step, HIDDEN, torch.float32)
    session.length, step.offset = 30, 10  # a part of it was computed
    assert session.abandon(step) == [(row[-1], Group((0, 1))) for row in pages(session)]
    assert (session.length, pool.used) == (20, 4)
    begin(session, 2, 12)  # to the end of a page
    step = Step(torch.zeros(2, 5, HIDDEN))
    session.begin(step, HIDDEN, torch.float32)
    assert session.abandon(step) == []
    assert (session.length, pool.used) == (32, 4)
    pool.check()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_what_the_span_cannot_hold_is_refused(pool: PagePool, dtype: torch.dtype) -> None:
    session = CacheSession(pool, 0, 2, [Group((0, 1))], rows=1, max_length=10)
    largest = torch.finfo(dtype).max
    for value in (largest * 1.5, float("inf"), float("nan")):
        hidden = torch.full((1, 1, HIDDEN), value, dtype=torch.float64)
        with pytest.raises(BadRequest, match=str(dtype).removeprefix("torch.")):
            session.begin(Step(hidden), HIDDEN, dtype)
        prompts = hidden.expand(2, 1, 1, HIDDEN)
        with pytest.raises(BadRequest, match="prompts"):
            session.begin(Step(torch.zeros(1, 1, HIDDEN), prompts=prompts), HIDDEN, dtype)
    step = Step(torch.full((1, 1, HIDDEN), largest, dtype=torch.float64))
    session.begin(step, HIDDEN, dtype)
    assert step.hidden.dtype == dtype


def test_answers_are_remembered_by_id(session: CacheSession) -> None:
    for step_id in (1, 0, 2, 3):
        output = StepOutput(torch.zeros(1), step_id, 0.0, 0.0, 1)
        session.remember(Step(torch.zeros(1, 1, HIDDEN), step_id=step_id), output)
    assert session.last_step is not None
    assert session.last_step[1] is output
    assert list(session.past_steps) == [1, 2]
