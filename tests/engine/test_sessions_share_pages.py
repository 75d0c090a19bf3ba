"""Many sessions over one pool: whatever is shared, copied, rolled back, found again, given back or thrown away, every
row's pages hold that row's tokens, and nobody takes more than was promised. No tensors: pages hold tokens here."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from lilliput.engine.pages import PagePool
from lilliput.engine.session import GRAIN, CacheSession, Step
from lilliput.engine.table import KEPT_BEFORE_WINDOW, kept_tokens
from lilliput.errors import SessionExpired
from lilliput.models.paged_cache import Group
from lilliput.server.admission import longest_row, pages_of_row

EMPTY = (-1, -1)


def key(tokens: list[int]) -> bytes:
    return hashlib.blake2b(bytes(tokens), digest_size=16).digest()


def keys(tokens: list[int], start: int = 0) -> list[bytes]:
    """Of the grains that end beyond `start`."""
    return [key(tokens[:end]) for end in range(GRAIN, len(tokens) + 1, GRAIN) if end > start]


class Promised:
    """A session, what was promised to it, and what its rows must hold."""

    def __init__(self, session: CacheSession, pages: int) -> None:
        self.session, self.pages = session, pages
        self.rows: list[list[int]] = []
        #: its length when it was longest, since it began with nothing; None: it began with pages that it found
        self.furthest: int | None = 0

    @property
    def length(self) -> int:
        return len(self.rows[0]) if self.rows else 0


def sharing(size: int, groups: Sequence[Group], count: int, longest: int, step: int) -> type[RuleBasedStateMachine]:
    """:param count: of pages
    :param longest: tokens of a row
    :param step: tokens of a row in one step"""
    kept = kept_tokens(groups, step)

    class Sharing(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.pool = PagePool(count, size)
            self.contents = [[EMPTY] * size for _ in range(count)]
            self.open_sessions: list[Promised] = []
            self.texts: list[list[int]] = []

        @property
        def free(self) -> int:
            return count - sum(s.pages for s in self.open_sessions)

        @precondition(lambda self: self.free >= len(groups))
        @rule(data=st.data(), rows=st.integers(1, 4), owner=st.sampled_from([b"a", b"a", b"b"]))
        def open(self, data: st.DataObject, rows: int, owner: bytes) -> None:
            rows = min(rows, self.free // len(groups))
            room = longest_row(self.free // rows, kept, size) or longest
            most = data.draw(st.integers(1, min(room, longest)))
            session = CacheSession(self.pool, 0, 2, groups, rows=rows, max_length=most, owner=owner)
            promised = Promised(session, rows * pages_of_row(most, kept, size))
            assert promised.pages <= self.free
            self.open_sessions.append(promised)
            if self.texts and data.draw(st.booleans()):
                texts = [data.draw(st.sampled_from(self.texts)) for _ in range(rows)]
                grains = min(len(text) for text in texts) // GRAIN
                if grains:
                    found = session.adopt_prefix([keys(text)[:grains] for text in texts])
                    assert found < most
                    if found:
                        promised.rows = [text[:found] for text in texts]
                        promised.furthest = None

        @precondition(lambda self: self.open_sessions)
        @rule(data=st.data(), token=st.integers(0, 1), fails=st.sampled_from([False, False, False, True]))
        def step(self, data: st.DataObject, token: int, fails: bool) -> None:
            promised = data.draw(st.sampled_from(self.open_sessions))
            session, options = promised.session, {}
            rows = [list(row) for row in promised.rows]
            if rows and data.draw(st.booleans()):
                parents = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=session.max_rows))
                rows = [list(rows[parent]) for parent in parents]
                options["parents"] = parents
            if rows and data.draw(st.booleans()):
                near = max(0, promised.length - data.draw(st.sampled_from([GRAIN, longest])))
                position = data.draw(st.integers(near, promised.length))
                rows = [row[:position] for row in rows]
                options["start_position"] = position
            if not rows:
                rows = [[] for _ in range(data.draw(st.integers(1, session.max_rows)))]
            start = len(rows[0])
            room = min(step, session.max_length - start)
            if not room:
                return
            tokens = data.draw(st.sampled_from([1, min(room, 3), min(room, size), room]))
            after = [row + [token] * tokens for row in rows]
            hashes = [keys(row, start) for row in after] if data.draw(st.integers(0, 3)) else None
            one = Step(torch.zeros(len(rows), tokens, 1), hashes=hashes, **options)  # type: ignore[arg-type]
            if not all(table.reaches(start) for table in session.tables):
                assert promised.furthest is None or 0 < start < promised.furthest - KEPT_BEFORE_WINDOW
                with pytest.raises(SessionExpired):
                    session.begin(one, 1, torch.float32)
                return
            session.begin(one, 1, torch.float32)
            self.nobody_takes_more_than_was_promised()
            for source, target in session.copies:
                self.contents[target] = list(self.contents[source])
            for page in session.fresh:
                self.contents[page] = [EMPTY] * size
            session.copies.clear()
            session.fresh.clear()
            one.offset = tokens - 1 if fails else tokens
            session.length += one.offset
            for number, table in enumerate(session.tables):
                for row in table.rows:
                    for slot in range(start, start + one.offset):
                        self.contents[row[slot // size - table.left]][slot % size] = (number, token)
            if not start:
                promised.furthest = 0
            if fails:
                session.abandon(one)
                promised.rows = rows
            else:
                session.finish(one)
                promised.rows = after
                self.texts = [*self.texts[-4:], after[-1]]
                if promised.furthest is not None:
                    promised.furthest = max(promised.furthest, promised.length)

        @precondition(lambda self: self.open_sessions)
        @rule(data=st.data())
        def close(self, data: st.DataObject) -> None:
            promised = data.draw(st.sampled_from(self.open_sessions))
            self.open_sessions.remove(promised)
            promised.session.close()

        @invariant()
        def every_row_holds_its_tokens(self) -> None:
            for promised in self.open_sessions:
                assert promised.session.length == promised.length
                for number, table in enumerate(promised.session.tables):
                    assert table.reaches(promised.length)
                    for row, tokens in zip(table.rows, promised.rows, strict=True):
                        held = [slot for page in row for slot in self.contents[page]]
                        expected = [(number, token) for token in tokens[table.left * size :]]
                        assert held[: len(expected)] == expected
                        assert len(row) == -(-len(tokens) // size) - table.left

        @invariant()
        def nobody_takes_more_than_was_promised(self) -> None:
            self.pool.check()
            assert self.pool.used <= sum(s.pages for s in self.open_sessions)
            for promised in self.open_sessions:
                rows = [row for table in promised.session.tables for row in table.rows]
                assert len({page for row in rows for page in row}) <= promised.pages

        def teardown(self) -> None:
            for promised in self.open_sessions:
                promised.session.close()
            assert self.pool.used == 0
            self.pool.check()

    return Sharing


FULL, NARROW, WIDE = Group((0, 1)), Group((2, 3), window=5), Group((4,), window=40)


@pytest.mark.parametrize(
    ("size", "groups", "count", "longest", "step"),
    [
        (16, [FULL], 24, 150, 150),
        (32, [FULL], 24, 150, 150),
        (16, [FULL, NARROW, WIDE], 100, 400, 30),
        (32, [NARROW, FULL], 60, 600, 90),
        (16, [NARROW, WIDE], 60, 500, 50),
    ],
)
def test_any_interleaving_of_sessions_that_share_pages(
    size: int, groups: list[Group], count: int, longest: int, step: int
) -> None:
    run_state_machine_as_test(
        sharing(size, groups, count, longest, step),
        settings=settings(
            max_examples=60 if groups == [FULL] else 30,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
