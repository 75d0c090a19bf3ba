"""A session's attention cache: page tables, a length, a promise. And the steps that change it.

All rows of a session have the same length. Rows that continue the same tokens share pages, so beams, `parents` and
rollback move no data; only a shared page that is written to is copied. Each group of blocks that look equally far back
has a page table of its own.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from lilliput.engine.pages import PagePool
from lilliput.engine.table import Table
from lilliput.errors import BadRequest, LilliputError, SessionExpired, TooLong
from lilliput.models.paged_cache import Group

_REMEMBERED_IDS = 64
#: page keys arrive for this many tokens each (wire.prefix.GRAIN; the engine knows no network, so it is named twice)
GRAIN = 16


@dataclass
class StepOutput:
    """What a step gives back."""

    hidden: torch.Tensor
    length: int
    queued_seconds: float
    compute_seconds: float
    computed_tokens: int


@dataclass(eq=False)
class Step:
    """Some tokens of every row, as they arrived. Shapes as in `wire/lilliput.proto`."""

    hidden: torch.Tensor
    step_id: int = 0
    start_position: int | None = None
    parents: Sequence[int] | None = None
    #: number of `parents`: they are done once, however many steps bring them along; 0: always
    reordering: int = 0
    mask: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None
    prompts: torch.Tensor | None = None
    hashes: Sequence[Sequence[bytes]] | None = None
    #: called once, from the engine's thread, with the output or an error
    done: Callable[[StepOutput | LilliputError], None] = lambda result: None
    arrived: float = field(default_factory=time.perf_counter)

    def to(self, device: torch.device) -> None:
        """Bring its tensors to a device."""
        bring(self, ("hidden", "mask", "position_ids", "prompts"), device)

    # progress, kept by the engine
    begun: bool = False
    offset: int = 0
    whole: bool = False
    started: float = 0.0
    compute_seconds: float = 0.0
    outputs: list[torch.Tensor] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return self.hidden.shape[0]

    @property
    def tokens(self) -> int:
        return self.hidden.shape[1]


class CacheSession:
    """One session's rows. Belongs to the engine's thread.

    :param start, end: the blocks that its steps run through
    :param groups: of these blocks
    :param rows: at most so many rows
    :param max_length: at most so many tokens a row; together with `rows` this is what admission promised
    :param owner: who may find this session's pages again by their keys
    :param adapter: that its tokens use; empty: none
    :param peer: whose it is
    :ivar tables: one for each group
    :ivar keys: of each row's grains, as far as they are known without a gap
    """

    def __init__(
        self,
        pool: PagePool,
        start: int,
        end: int,
        groups: Sequence[Group],
        *,
        rows: int,
        max_length: int,
        bid: float = 0.0,
        owner: bytes = b"",
        adapter: str = "",
        peer: str = "",
    ) -> None:
        self._page_size = pool.page_size
        # a page holds what one part of the span computed with one adapter, and is found again by its owner only
        scope = f"{adapter}:".encode() + owner  # no adapter's name has a colon
        self.tables = [
            Table(pool, group, f"{start}:{end}:{number}:".encode() + scope) for number, group in enumerate(groups)
        ]
        self.keys: list[list[bytes]] = []
        self.adapter, self.peer = adapter, peer
        self.start, self.end = start, end
        self.max_rows, self.max_length, self.bid = rows, max_length, bid
        self.length = 0
        self.closed = False
        #: number of the last reordering that was done
        self.reordered = 0
        #: tokens that its steps ran through the blocks
        self.computed_tokens = 0
        self.last_step: tuple[int, StepOutput] | None = None
        #: ids of steps that were computed before, of which no output is kept
        self.past_steps: deque[int] = deque(maxlen=_REMEMBERED_IDS)
        #: for the engine, before the next round: pages to be copied, and pages to be cleared
        #: (what a stranger left in a page is multiplied with a weight of zero; that must not be zero times infinity)
        self.copies: list[tuple[int, int]] = []
        self.fresh: list[int] = []

    @property
    def rows(self) -> int:
        return len(self.keys)

    def adopt_prefix(self, prefix: Sequence[Sequence[bytes]]) -> int:
        """Start with whatever pages are known for these keys, one list a row. Returns the tokens found, per row."""
        grains = self._page_size // GRAIN
        pages = [keys[grains - 1 :: grains] for keys in prefix]
        # a step past the session's length would have no room, and at least one token must be left to compute
        count = min([(self.max_length - 1) // self._page_size, *map(len, pages)])
        checked = -1
        while count != checked:  # what one table lacks, the others need not have
            checked = count
            for table in self.tables:
                for keys in pages:
                    count = table.known(keys, count)
        if count:
            for table in self.tables:
                table.adopt([keys[:count] for keys in pages])
            self.keys = [list(keys[: count * grains]) for keys in prefix]
        self.length = count * self._page_size
        return self.length

    def begin(self, step: Step, hidden_size: int, dtype: torch.dtype) -> None:
        """Check a step against what the session holds and make room for its tokens.

        Raises `BadRequest` or `TooLong`; then nothing has changed.

        :param dtype: in which the span computes
        """
        if 0 < step.reordering <= self.reordered:
            step.parents = None
        self._check(step, hidden_size)
        step.hidden = as_finite(step.hidden, dtype, "hidden states")
        if step.prompts is not None:
            step.prompts = as_finite(step.prompts, dtype, "prompts")
        if step.parents is not None:
            self._reorder(step.parents)
            self.reordered = max(self.reordered, step.reordering)
        if step.start_position is not None:
            self._rollback(step.start_position)
        if self.length == 0:
            self.keys = [[] for _ in range(step.rows)]
            for table in self.tables:
                table.begin(step.rows)
        for table in self.tables:
            copies, fresh = table.grow(self.length, self.length + step.tokens)
            self.copies += copies
            self.fresh += fresh
        step.begun = True

    def finish(self, step: Step) -> None:
        """All of a step's tokens are in the cache: pages that became full can be found by their keys."""
        if step.hashes is not None:
            self._publish(step.hashes, (self.length - step.tokens) // GRAIN)
        for table in self.tables:
            table.leave_behind(self.length)

    def abandon(self, step: Step) -> list[tuple[int, Group]]:
        """The step failed while computing: forget its tokens. The session stays usable.

        What a step did to the rows before it was computed (`parents`, `start_position`) stays done. Returns the pages
        behind whose last token the step may have left anything, each with the blocks that it is for.
        """
        self._rollback(self.length - step.offset)
        self.copies.clear()
        self.fresh.clear()
        if self.length % self._page_size == 0:
            return []
        return [(row[-1], table.group) for table in self.tables for row in table.rows]

    def remember(self, step: Step, output: StepOutput) -> None:
        """Keep the output of the last step, in case that the client asks again."""
        if self.last_step is not None and self.last_step[0]:
            self.past_steps.append(self.last_step[0])
        self.last_step = (step.step_id, output)

    def close(self) -> None:
        """Give all pages back. May be called twice."""
        for table in self.tables:
            table.close()
        self.keys, self.copies, self.fresh, self.last_step = [], [], [], None
        self.length, self.closed = 0, True

    def _check(self, step: Step, hidden_size: int) -> None:
        hidden = step.hidden
        if hidden.dim() != 3 or hidden.shape[-1] != hidden_size:
            raise BadRequest(f"hidden states must be [rows, tokens, {hidden_size}], not {list(hidden.shape)}")
        if not hidden.is_floating_point():
            raise BadRequest(f"hidden states must be floating-point numbers, not {hidden.dtype}")
        if not 0 < step.rows <= self.max_rows:
            raise BadRequest(f"{step.rows} rows in a session that was opened for {self.max_rows}")
        if step.tokens == 0:
            raise BadRequest("a step without tokens; send a ping to keep a session alive")
        start = self.length if step.start_position is None else step.start_position
        if start > self.length:
            raise BadRequest(f"start_position {start} is beyond the {self.length} tokens in the cache")
        for table in self.tables:
            if not table.reaches(start):
                raise SessionExpired(
                    f"what lies before token {start} was given back: some of these blocks look at {table.group.window} "
                    f"tokens; send all tokens again"
                )
        current = self.rows
        if step.parents is not None:
            if not current:
                raise BadRequest("parents in a session without rows yet")
            if len(step.parents) != step.rows:
                raise BadRequest(f"{len(step.parents)} parents for {step.rows} rows")
            if not all(0 <= parent < current for parent in step.parents):
                raise BadRequest(f"parents {list(step.parents)} must be rows of the session, 0 to {current - 1}")
        elif start and step.rows != current:
            raise BadRequest(f"{step.rows} rows sent, but the session has {current}; name their parents to change that")
        length = start + step.tokens
        if length > self.max_length:
            raise TooLong(
                f"{start} tokens in the cache and {step.tokens} more pass the session's max_length of {self.max_length}"
            )
        if step.mask is not None:
            step.mask = step.mask[None] if step.mask.dim() == 2 else step.mask
            expected = f"bool [{step.rows} or 1, {step.tokens}, {length}]"
            shape = tuple(step.mask.shape)
            if step.mask.dtype != torch.bool or shape not in (
                (step.rows, step.tokens, length),
                (1, step.tokens, length),
            ):
                raise BadRequest(f"the mask must be {expected}, not {step.mask.dtype} {list(shape)}")
        if step.position_ids is not None:
            ids = step.position_ids
            if ids.dtype not in (torch.int64, torch.int32) or tuple(ids.shape) != (step.rows, step.tokens):
                raise BadRequest(
                    f"position_ids must be int64 [{step.rows}, {step.tokens}], not {ids.dtype} {list(ids.shape)}"
                )
            if int(ids.min()) < 0 or int(ids.max()) >= 1 << 31:
                raise BadRequest("position_ids must be 0 or more, and below 2^31")
        if step.prompts is not None:
            wanted = (self.end - self.start, step.rows, step.tokens, hidden_size)
            if tuple(step.prompts.shape) != wanted or not step.prompts.is_floating_point():
                raise BadRequest(f"prompts must be floating-point {list(wanted)}, not {list(step.prompts.shape)}")
        if step.hashes is not None and len(step.hashes) != step.rows:
            raise BadRequest(f"page keys for {len(step.hashes)} rows in a step of {step.rows}")

    def _reorder(self, parents: Sequence[int]) -> None:
        self.keys = [list(self.keys[parent]) for parent in parents]
        for table in self.tables:
            table.reorder(parents)

    def _rollback(self, position: int) -> None:
        for keys in self.keys:
            del keys[position // GRAIN :]
        for table in self.tables:
            table.roll_back(position)
        self.length = position

    def _publish(self, hashes: Sequence[Sequence[bytes]], before: int) -> None:
        """The last step's keys: rows had `before` grains until then."""
        grains = self._page_size // GRAIN
        first = before // grains
        for row, (known, keys) in enumerate(zip(self.keys, hashes, strict=True)):
            if len(known) == before and len(keys) == self.length // GRAIN - before:
                known.extend(keys)
                for table in self.tables:
                    table.publish(row, first, known[(first + 1) * grains - 1 :: grains])


def bring(record: object, names: Sequence[str], device: torch.device) -> None:
    """Have the tensors of these names on a device, as far as there are any."""
    for name in names:
        if (tensor := getattr(record, name)) is not None:
            setattr(record, name, tensor.to(device))


def as_finite(tensor: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    """A tensor in the dtype of the span. Raises `BadRequest` if there is anything but numbers in it."""
    converted = tensor.to(dtype)
    if not bool(torch.isfinite(converted).all()):
        raise BadRequest(f"the {name} contain NaN, infinity, or more than {str(dtype).removeprefix('torch.')} can hold")
    return converted
