"""Many sessions over one pool: whatever is shared, copied, rolled back, found again or thrown away, every row's pages
hold that row's tokens, and nobody takes more than was promised. No tensors: pages hold tokens here."""

from __future__ import annotations

import hashlib

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from lilliput.engine.pages import PagePool
from lilliput.engine.session import GRAIN, CacheSession, Step

PAGES, LONGEST = 24, 150


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

    @property
    def length(self) -> int:
        return len(self.rows[0]) if self.rows else 0


def sharing(size: int) -> type[RuleBasedStateMachine]:
    class Sharing(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.pool = PagePool(PAGES, size)
            self.contents = [[-1] * size for _ in range(PAGES)]
            self.open_sessions: list[Promised] = []
            self.texts: list[list[int]] = []

        @property
        def free(self) -> int:
            return PAGES - sum(s.pages for s in self.open_sessions)

        @precondition(lambda self: self.free)
        @rule(data=st.data(), rows=st.integers(1, 4), owner=st.sampled_from([b"a", b"a", b"b"]))
        def open(self, data: st.DataObject, rows: int, owner: bytes) -> None:
            rows = min(rows, self.free)
            longest = data.draw(st.integers(1, min(self.free // rows * size, LONGEST)))
            session = CacheSession(self.pool, 0, 2, rows=rows, max_length=longest, owner=owner)
            promised = Promised(session, rows * -(-longest // size))
            self.open_sessions.append(promised)
            if self.texts and data.draw(st.booleans()):
                texts = [data.draw(st.sampled_from(self.texts)) for _ in range(rows)]
                count = min(len(text) for text in texts) // GRAIN
                if count:
                    found = session.adopt_prefix([keys(text)[:count] for text in texts])
                    assert found < longest
                    promised.rows = [text[:found] for text in texts] if found else []

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
                position = data.draw(st.integers(0, promised.length))
                rows = [row[:position] for row in rows]
                options["start_position"] = position
            if not rows:
                rows = [[] for _ in range(data.draw(st.integers(1, session.max_rows)))]
            start = len(rows[0])
            room = session.max_length - start
            if not room:
                return
            tokens = data.draw(st.sampled_from([1, min(room, 3), min(room, size), room]))
            after = [row + [token] * tokens for row in rows]
            hashes = [keys(row, start) for row in after] if data.draw(st.booleans()) else None
            step = Step(torch.zeros(len(rows), tokens, 1), hashes=hashes, **options)  # type: ignore[arg-type]
            session.begin(step, 1, torch.float32)
            for source, target in session.copies:
                self.contents[target] = list(self.contents[source])
            for page in session.fresh:
                self.contents[page] = [-1] * size
            session.copies.clear()
            session.fresh.clear()
            step.offset = tokens - 1 if fails else tokens
            session.length += step.offset
            for row in session.rows:
                for slot in range(start, start + step.offset):
                    self.contents[row.pages[slot // size]][slot % size] = token
            if fails:
                session.abandon(step)
                promised.rows = rows
            else:
                session.finish(step)
                promised.rows = after
                self.texts = [*self.texts[-4:], after[-1]]

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
                for row, tokens in zip(promised.session.rows, promised.rows, strict=True):
                    held = [token for page in row.pages for token in self.contents[page]]
                    assert held[: len(tokens)] == tokens
                    assert len(row.pages) == -(-len(tokens) // size)

        @invariant()
        def nobody_takes_more_than_was_promised(self) -> None:
            self.pool.check()
            assert self.pool.used <= sum(s.pages for s in self.open_sessions)
            for promised in self.open_sessions:
                assert len({page for row in promised.session.rows for page in row.pages}) <= promised.pages

        def teardown(self) -> None:
            for promised in self.open_sessions:
                promised.session.close()
            assert self.pool.used == 0
            self.pool.check()

    return Sharing


@pytest.mark.parametrize("size", [16, 32])
def test_any_interleaving_of_sessions_that_share_pages(size: int) -> None:
    run_state_machine_as_test(
        sharing(size),
        settings=settings(
            max_examples=60,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
