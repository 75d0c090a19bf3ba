"""A tape plays what the caches hold, whatever was appended, rolled back and reordered before."""

from __future__ import annotations

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from lilliput.client import tape as tape_module
from lilliput.client.tape import Part, Tape

HIDDEN = 3


class Tapes(RuleBasedStateMachine):
    """Beside the tape, lists of tokens for each row: number, position id or None, first place that it sees or None."""

    def __init__(self) -> None:
        super().__init__()
        self.tape = Tape(first_block=2, budget=1 << 30)
        self.rows: list[list[tuple[float, int | None, int | None]]] = []
        self.count = 0
        self.mark = self.tape.mark()
        self.marked: list[list[float]] = []

    @property
    def length(self) -> int:
        return len(self.rows[0]) if self.rows else 0

    @rule(
        rows=st.integers(1, 3),
        tokens=st.integers(1, 5),
        shifted=st.booleans(),
        masked=st.booleans(),
    )
    def append(self, rows: int, tokens: int, shifted: bool, masked: bool) -> None:
        if self.length:
            rows = len(self.rows)
        else:
            self.rows = [[] for _ in range(rows)]
        numbers = torch.arange(self.count, self.count + rows * tokens, dtype=torch.float32).reshape(rows, tokens)
        self.count += rows * tokens
        begin, end = self.length, self.length + tokens
        ids = torch.arange(begin, end).expand(rows, tokens) + 100 if shifted else None
        mask = torch.zeros(rows, tokens, end, dtype=torch.bool) if masked else None
        for row in range(rows):
            for token in range(tokens):
                place = begin + token
                if mask is not None:
                    mask[row, token, place // 2 : place + 1] = True
                self.rows[row].append(
                    (float(numbers[row, token]), place + 100 if shifted else None, place // 2 if masked else None)
                )
        part = Part(numbers[..., None].repeat(1, 1, HIDDEN), begin, mask, ids)
        self.tape.append(part)
        for block in (2, 4):
            self.tape.write(block, part)

    @precondition(lambda self: self.length)
    @rule(data=st.data())
    def crop(self, data: st.DataObject) -> None:
        length = data.draw(st.integers(0, self.length))
        self.tape.crop(length)
        self.rows = [row[:length] for row in self.rows]

    @precondition(lambda self: self.length)
    @rule(data=st.data())
    def reorder(self, data: st.DataObject) -> None:
        parents = data.draw(st.lists(st.integers(0, len(self.rows) - 1), min_size=1, max_size=4))
        self.tape.reorder(parents)
        self.rows = [list(self.rows[parent]) for parent in parents]

    @rule()
    def set_mark(self) -> None:
        self.mark, self.marked = self.tape.mark(), [[token[0] for token in row] for row in self.rows]

    @invariant()
    def knows_what_was_there_before(self) -> None:
        """A server that was fed then, of rows that are the same in all of them one, holds what it says."""
        kept = self.tape.kept(self.mark)
        assert kept <= min(self.length, len(self.marked[0]) if self.marked else 0)
        now = [[token[0] for token in row[:kept]] for row in self.rows]
        before = [row[:kept] for row in self.marked]
        if kept and len(now) != len(before):
            assert all(row == before[0] for row in (*before, *now))
        elif kept:
            assert now == before
        if self.mark.numbering == self.tape.mark().numbering and self.marked and len(self.rows) == len(self.marked):
            assert kept == self.length or any(
                len(old) == kept or new[kept][0] != old[kept] for new, old in zip(self.rows, self.marked, strict=True)
            )

    @invariant()
    def plays_what_is_there(self) -> None:
        assert self.tape.length == self.length
        if not self.length:
            return
        assert self.tape.rows == len(self.rows)
        same = [len({row[place][0] for row in self.rows}) == 1 for place in range(self.length)]
        assert self.tape.shared == (same.index(False) if False in same else self.length)
        for block in (2, 4):
            assert self.tape.knows(block, 0, self.length)
            for begin in {0, self.length // 2}:
                part = self.tape.play(block, begin, self.length)
                assert part.hidden[..., 0].tolist() == [[token[0] for token in row[begin:]] for row in self.rows]
                for row, tokens in enumerate(self.rows):
                    for place, (_, position_id, first) in list(enumerate(tokens))[begin:]:
                        ids = part.position_ids
                        found = place if ids is None else int(ids[row, place - begin])
                        assert found == (place if position_id is None else position_id)
                        seen = torch.arange(self.length) <= place
                        if part.mask is not None:
                            seen = part.mask[row, place - begin]
                        expected = torch.arange(self.length)
                        assert seen.tolist() == ((expected <= place) & (expected >= (first or 0))).tolist()
        assert not self.tape.knows(3, 0, self.length)


def test_a_tape_plays_what_is_in_the_caches(monkeypatch: object) -> None:
    before, tape_module._WORTH_CLEARING = tape_module._WORTH_CLEARING, 8
    try:
        run_state_machine_as_test(Tapes, settings=settings(max_examples=60, stateful_step_count=25, deadline=None))
    finally:
        tape_module._WORTH_CLEARING = before


def test_hidden_states_between_servers_are_bounded() -> None:
    tape = Tape(first_block=0, budget=10_000)
    for begin in range(0, 1000, 10):
        part = Part(torch.randn(1, 10, 64), begin)
        tape.append(part)
        for block in (0, 3, 6):
            tape.write(block, part)
    assert tape.knows(0, 0, 1000)
    assert not tape.knows(3, 0, 1000)
    between = sum(store.nbytes for block, store in tape._hidden.items() if block)
    assert between <= 30_000
    part = tape.play(0, 0, 1000)
    for block in (3,):
        for begin in range(0, 1000, 100):
            tape.write(block, part.cut(begin, begin + 100), needed=True)
    assert torch.equal(tape.play(3, 0, 1000).hidden, part.hidden)
