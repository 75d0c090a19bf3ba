"""What a chain's servers were sent since position 0: all that others need to take their places.

A tape follows the caches: what is rolled back there is forgotten here, rows that are reordered there are reordered
here. Each token is kept once; a row is a list of places among the tokens, so rollback and reordering move numbers only.
Of each token are kept what went along with it (mask, position id, prompts), once, and its hidden states at every block
where a server's span begins.

With hidden states of 8,192 numbers in bfloat16 that is 16 KiB a token and server: `budget` bounds it. Those that the
first server was sent are kept in any case. The others can be made again from them, by the servers that made them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import torch

from lilliput.errors import BadRequest

#: below so many kept tokens it does not pay to look for some that no row uses any more
_WORTH_CLEARING = 1024


@dataclass
class Part:
    """Some tokens of every row, as they enter a block. Shapes as in `wire/lilliput.proto`.

    :ivar begin: the place of the first token
    :ivar prompts: for all blocks of the chain
    :ivar first_block: of the chain
    """

    hidden: torch.Tensor
    begin: int
    mask: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None
    prompts: torch.Tensor | None = None
    first_block: int = 0
    hashes: bytes = b""
    #: ask for a session of so many tokens first
    max_length: int = 0
    request_id: str = ""

    @property
    def rows(self) -> int:
        return self.hidden.shape[0]

    @property
    def end(self) -> int:
        return self.begin + self.hidden.shape[1]

    def split(self, count: int) -> tuple[Part, Part]:
        """The first `count` tokens, and the rest."""
        return self.cut(0, count), self.cut(count, self.hidden.shape[1])

    def cut(self, begin: int, end: int) -> Part:
        """Some of its tokens, counted from its first."""
        mask, ids, prompts = self.mask, self.position_ids, self.prompts
        return replace(
            self,
            hidden=self.hidden[:, begin:end],
            begin=self.begin + begin,
            mask=None if mask is None else mask[:, begin:end, : self.begin + end],
            position_ids=None if ids is None else ids[:, begin:end],
            prompts=None if prompts is None else prompts[:, :, begin:end],
        )

    def tensors(self, start: int, end: int) -> dict[str, torch.Tensor]:
        """What goes along with the hidden states to blocks `[start, end)`."""
        prompts = self.prompts
        if prompts is not None:
            prompts = prompts[start - self.first_block : end - self.first_block]
        named = {"mask": self.mask, "position_ids": self.position_ids, "prompts": prompts}
        return {name: tensor for name, tensor in named.items() if tensor is not None}


class _Store:
    """A value for each token, in a tensor that grows, `[capacity, ...]`; and which tokens have one."""

    def __init__(self) -> None:
        self._data = torch.empty(0)
        self.known = torch.zeros(0, dtype=torch.bool)

    @property
    def nbytes(self) -> int:
        return self._data.nbytes

    @property
    def width(self) -> int:
        return self._data.shape[-1]

    def write(self, slots: torch.Tensor, values: torch.Tensor, capacity: int) -> None:
        """:param values: `[*slots.shape, ...]`"""
        if capacity > len(self.known):
            size, kept = 2 * capacity, len(self.known)
            shape = values.shape[slots.dim() :]
            data, known = torch.zeros(size, *shape, dtype=values.dtype), torch.zeros(size, dtype=torch.bool)
            if kept:
                data[:kept], known[:kept] = self._data, self.known
            self._data, self.known = data, known
        self._data[slots] = values.to(self._data.dtype)
        self.known[slots] = True

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        return self._data[slots]

    def keep_only(self, slots: torch.Tensor) -> None:
        self._data, self.known = self._data[slots], self.known[slots]


@dataclass(frozen=True)
class Mark:
    """Which tokens were on a tape at some time.

    :ivar slots: int64 [rows, length]: where each was kept
    :ivar numbering: the time in which these numbers meant that
    """

    slots: torch.Tensor
    numbering: int


@dataclass
class Tape:
    """The tokens `[rows, length]` of a session.

    :ivar first_block: of the chain
    :ivar budget: bytes that hidden states between servers may take
    """

    first_block: int
    budget: int
    _numbering: int = 0
    #: int64 [rows, at least length]: where each token is kept
    _slots: torch.Tensor = field(default_factory=lambda: torch.empty(0, 0, dtype=torch.int64))
    _length: int = 0
    _used: int = 0
    _hidden: dict[int, _Store] = field(default_factory=dict)
    _given_up: set[int] = field(default_factory=set)
    _position_ids: _Store = field(default_factory=_Store)
    _prompts: _Store = field(default_factory=_Store)
    #: what a token attends to, where that is not all before it: bool [length after its step]
    _masks: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """Tokens per row."""
        return self._length

    @property
    def rows(self) -> int:
        return self._slots.shape[0]

    @property
    def shared(self) -> int:
        """So many leading tokens are the same in all rows."""
        slots = self._slots[:, : self._length]
        return _equal(slots, slots[:1])

    def mark(self) -> Mark:
        """What is on the tape now."""
        return Mark(self._slots[:, : self._length].clone(), self._numbering)

    def kept(self, mark: Mark) -> int:
        """So many leading tokens of every row are those that were there at the mark.

        With more or fewer rows than then: those that all rows shared then, and still do.
        """
        if mark.numbering != self._numbering:
            return 0
        before, now = mark.slots, self._slots[:, : self._length]
        if len(before) != len(now):
            before = before[:1, : _equal(before, before[:1])]
        return _equal(before, now)

    def append(self, part: Part) -> None:
        """Add the tokens of a part that enters the chain. What it becomes further on is written as it appears.

        Raises `BadRequest` if they have another width than those before.
        """
        rows, count, width = part.hidden.shape
        if not self._length:  # a new beginning
            self._used = 0
            self._numbering += 1
            self._hidden.clear()
            self._masks.clear()
            self._position_ids, self._prompts = _Store(), _Store()
        elif (held := self._hidden[self.first_block].width) != width:
            raise BadRequest(f"hidden states must be [rows, tokens, {held}] like those before, not {width} wide")
        slots = torch.arange(self._used, self._used + rows * count).reshape(rows, count)
        self._used += rows * count
        if not self._length and rows != self.rows:
            self._slots = torch.empty(rows, 0, dtype=torch.int64)
        after = self._length + count
        if after > self._slots.shape[1]:
            grown = torch.empty(rows, max(2 * after, 64), dtype=torch.int64)
            grown[:, : self._length] = self._slots[:, : self._length]
            self._slots = grown
        self._slots[:, self._length : after] = slots
        self._length = after
        self._hidden.setdefault(self.first_block, _Store()).write(slots, part.hidden, self._used)
        if part.position_ids is not None:
            self._position_ids.write(slots, part.position_ids, self._used)
        if part.prompts is not None:
            self._prompts.write(slots, part.prompts.permute(1, 2, 0, 3), self._used)
        if part.mask is not None:
            for row, of_row in enumerate(part.mask.expand(rows, -1, -1)):
                for token, seen in enumerate(of_row):
                    self._masks[int(slots[row, token])] = seen.clone()

    def write(self, block: int, part: Part, *, needed: bool = False) -> None:
        """Keep the hidden states of a part that enters a later `block`, if there is room or they are `needed`."""
        if block == self.first_block:
            return
        if not needed:
            between = sum(store.nbytes for at, store in self._hidden.items() if at != self.first_block)
            if between >= self.budget:
                self._hidden.pop(block, None)
                self._given_up.add(block)
            if block in self._given_up:  # what comes later is of no use without what was before
                return
        slots = self._slots[: part.rows, part.begin : part.end]
        self._hidden.setdefault(block, _Store()).write(slots, part.hidden, self._used)

    def knows(self, block: int, begin: int, end: int) -> bool:
        """Whether tokens `[begin, end)` can be played to a server that begins with `block`."""
        slots = self._slots[:, begin:end]
        store = self._hidden.get(block)
        if not slots.numel():
            return True
        return store is not None and len(store.known) > int(slots.max()) and bool(store.known[slots].all())

    def seen(self, block: int, end: int) -> bool:
        """Whether the first `end` tokens are on the tape just as a server that begins with `block` was sent them."""
        return block not in self._given_up and self.knows(block, 0, end)

    def play(self, block: int, begin: int, end: int, *, rows: int | None = None) -> Part:
        """Tokens `[begin, end)` of the first `rows` rows, by default of all, as they entered `block`."""
        slots = self._slots[:rows, begin:end]
        part = Part(self._hidden[block].read(slots), begin, first_block=self.first_block)
        last = int(slots.max())
        if self._any(self._position_ids, last):
            known, ids = self._position_ids.known[slots], self._position_ids.read(slots)
            part.position_ids = torch.where(known, ids, torch.arange(begin, end))
        if self._any(self._prompts, last):
            part.prompts = self._prompts.read(slots).permute(2, 0, 1, 3)
        if self._masks:
            part.mask = self._mask(slots, begin, end)
        return part

    def crop(self, length: int) -> None:
        """Forget what lies beyond `length`."""
        if length < self._length:
            self._length = length
            self._clear()

    def reorder(self, parents: Sequence[int]) -> None:
        """New row i continues old row `parents[i]`."""
        if list(parents) != list(range(self.rows)):
            self._slots = self._slots[torch.tensor(parents, dtype=torch.int64)]
            self._clear()

    def keep_only(self, blocks: Collection[int]) -> None:
        """Servers' spans begin at these blocks now; hidden states at others are of no use."""
        for block in self._hidden.keys() - {self.first_block, *blocks}:
            del self._hidden[block]

    def _any(self, store: _Store, last: int) -> bool:
        if last >= len(store.known) > 0:  # tokens that came later without one
            store.write(torch.empty(0, dtype=torch.int64), store.read(torch.empty(0, dtype=torch.int64)), last + 1)
        return len(store.known) > 0

    def _mask(self, slots: torch.Tensor, begin: int, end: int) -> torch.Tensor | None:
        places = torch.arange(end)
        mask = (places[None, :] <= places[begin:, None]).repeat(slots.shape[0], 1, 1)
        special = False
        for row, of_row in enumerate(slots.tolist()):
            for token, slot in enumerate(of_row):
                seen = self._masks.get(slot)
                if seen is not None:
                    special = True
                    width = min(len(seen), end)
                    mask[row, token] = False
                    mask[row, token, :width] = seen[:width]
        return mask if special else None

    def _clear(self) -> None:
        """Give back the memory of tokens that no row uses any more, when that is most of them."""
        if self._used < max(_WORTH_CLEARING, 2 * self.rows * self._length):
            return
        used = self._slots[:, : self._length]
        live = used.unique()
        moved = torch.zeros(self._used, dtype=torch.int64)
        moved[live] = torch.arange(len(live))
        self._slots = moved[used]
        for store in (*self._hidden.values(), self._position_ids, self._prompts):
            if len(store.known):
                self._any(store, self._used - 1)
                store.keep_only(live)
        alive = set(live.tolist())
        self._masks = {int(moved[slot]): seen for slot, seen in self._masks.items() if slot in alive}
        self._used = len(live)
        self._numbering += 1


def _equal(one: torch.Tensor, other: torch.Tensor) -> int:
    """So many leading columns of `[rows, n]` and `[rows, m]` are equal; one of them may have but one row."""
    count = min(one.shape[1], other.shape[1])
    differs = (one[:, :count] != other[:, :count]).any(dim=0).nonzero()
    return int(differs[0]) if len(differs) else count
