"""Page tables of one session: blocks with windows give pages back, the others keep theirs, and both are found again."""

from __future__ import annotations

import pytest
import torch

from lilliput.engine.pages import PagePool
from lilliput.engine.session import GRAIN, CacheSession, Step
from lilliput.engine.table import KEPT_BEFORE_WINDOW, kept_tokens
from lilliput.errors import SessionExpired
from lilliput.models.paged_cache import Group
from lilliput.server.admission import pages_of_row

SIZE, WINDOW = 16, 20
FULL, NARROW = Group((0, 2)), Group((1, 3), window=WINDOW)
LENGTH = 400
KEYS = [number.to_bytes(16, "big") for number in range(LENGTH // GRAIN)]


def begin(session: CacheSession, tokens: int, **options: object) -> None:
    """A step, as if it was computed."""
    before = session.length if options.get("start_position") is None else options["start_position"]
    keys = [KEYS[before // GRAIN : (before + tokens) // GRAIN]] * (session.rows or 1)  # type: ignore[operator]
    step = Step(torch.zeros(session.rows or 1, tokens, 1), hashes=keys, **options)  # type: ignore[arg-type]
    session.begin(step, 1, torch.float32)
    session.length += tokens
    step.offset = tokens
    session.finish(step)


@pytest.fixture
def pool() -> PagePool:
    return PagePool(60, SIZE)


@pytest.fixture
def session(pool: PagePool) -> CacheSession:
    return opened(pool)


def opened(pool: PagePool) -> CacheSession:
    return CacheSession(pool, 0, 4, [FULL, NARROW], rows=1, max_length=LENGTH + 50)


def read_and_closed(pool: PagePool, session: CacheSession) -> int:
    """A text is read in steps of 40 tokens. Returns the number of its narrow pages that were given back by then."""
    for _ in range(LENGTH // 40):
        begin(session, 40)
    left = session.tables[1].left
    session.close()
    return left


def take_kept(pool: PagePool, count: int) -> None:
    """Somebody needs so many pages beyond those that are free."""
    for _ in range(pool.count - pool.used - pool.kept + count):
        pool.take()


def test_only_blocks_with_a_window_give_pages_back(pool: PagePool, session: CacheSession) -> None:
    for length in range(40, LENGTH + 1, 40):
        begin(session, 40)
        full, narrow = session.tables
        assert full.left == 0
        assert len(full.rows[0]) == -(-length // SIZE)
        assert narrow.left == max(0, length - WINDOW - KEPT_BEFORE_WINDOW) // SIZE
        assert pool.used == -(-length // SIZE) * 2 - narrow.left
    session.close()
    assert pool.used == 0
    pool.check()


@pytest.mark.parametrize("step", [1, 7, 16, 30, 62])
def test_no_more_pages_are_used_than_admission_promises(step: int) -> None:
    most = 0
    for first in range(SIZE):
        session = CacheSession(pool := PagePool(100, SIZE), 0, 4, [NARROW], rows=1, max_length=400)
        for tokens in [first + 1, *[step] * (300 // step)]:
            session.begin(one := Step(torch.zeros(1, tokens, 1)), 1, torch.float32)
            most = max(most, pool.used)
            session.length += tokens
            one.offset = tokens
            session.finish(one)
    assert most == pages_of_row(400, kept_tokens([NARROW], step), SIZE)


def test_both_kinds_are_rolled_back_as_far_as_the_window_is_kept(pool: PagePool, session: CacheSession) -> None:
    for _ in range(5):
        begin(session, 40)
    begin(session, 3, start_position=200 - KEPT_BEFORE_WINDOW)
    assert session.length == 139
    used = pool.used
    with pytest.raises(SessionExpired, match=f"look at {WINDOW} tokens"):
        begin(session, 1, start_position=60)
    assert (session.length, pool.used) == (139, used)
    begin(session, 1, start_position=0)
    assert [table.left for table in session.tables] == [0, 0]
    assert (session.length, pool.used) == (1, 2)
    pool.check()


def test_a_prefix_is_found_without_what_lies_behind_the_window(pool: PagePool, session: CacheSession) -> None:
    left = read_and_closed(pool, session)
    take_kept(pool, left)  # those that were given back first
    again = opened(pool)
    assert again.adopt_prefix([KEYS]) == LENGTH
    full, narrow = again.tables
    assert (full.left, narrow.left) == (0, left)
    assert (len(full.rows[0]), len(narrow.rows[0])) == (LENGTH // SIZE, LENGTH // SIZE - left)
    begin(again, 1, start_position=LENGTH - 1)
    again.close()
    pool.check()


def test_a_prefix_whose_window_is_gone_is_not_found(pool: PagePool, session: CacheSession) -> None:
    left = read_and_closed(pool, session)
    middle = opened(pool)
    assert middle.adopt_prefix([KEYS[:10]]) == 160
    middle.close()  # its pages are those that were used last
    take_kept(pool, left)
    assert opened(pool).adopt_prefix([KEYS[:5]]) == 0  # of blocks without windows all pages are there
    again = opened(pool)
    assert again.adopt_prefix([KEYS[:11]]) == 160
    assert again.tables[1].left <= (160 - WINDOW) // SIZE


def test_what_is_left_of_the_tokens_before_the_window_is_kept(pool: PagePool, session: CacheSession) -> None:
    left = read_and_closed(pool, session)
    take_kept(pool, left)
    again = opened(pool)
    assert again.adopt_prefix([KEYS[:-1]]) == LENGTH - SIZE
    assert again.tables[1].left == left  # one page more would be kept, and is gone
    with pytest.raises(SessionExpired):
        begin(again, 1, start_position=left * SIZE)
    begin(again, 1, start_position=left * SIZE + WINDOW - 1)
    again.close()
    pool.check()


def test_what_one_row_lacks_no_row_keeps(pool: PagePool) -> None:
    for first in (0, 1):  # two texts
        session = opened(pool)
        session.begin(
            step := Step(torch.zeros(1, 96, 1), hashes=[[bytes([first, n]) for n in range(6)]]), 1, torch.float32
        )
        session.length = step.offset = 96
        session.finish(step)
        session.close()
    both = CacheSession(pool, 0, 4, [FULL, NARROW], rows=2, max_length=LENGTH)
    texts = [[bytes([0, n]) for n in range(6)], [bytes([1, n]) for n in range(5)]]
    assert both.adopt_prefix(texts) == 80
    assert [len(row) for table in both.tables for row in table.rows] == [5, 5, 5, 5]
    both.close()
    pool.check()
