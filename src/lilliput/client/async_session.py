"""A session over a whole chain of servers, on the event loop of its connection.

`InferenceSession` (in `session`) is the same for callers that are not asynchronous.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence

import torch

from lilliput.client.audit import AuditCounts
from lilliput.client.chain import Chain
from lilliput.client.history import UNKNOWN, TokenHistory, for_all_rows
from lilliput.client.recovery import Recovery
from lilliput.client.remote import RemoteModel
from lilliput.client.route import Hop
from lilliput.client.server_session import HopStats, QueueCallback
from lilliput.client.step_trace import StepTrace
from lilliput.client.tape import Part
from lilliput.errors import BadRequest, TooLong, Unreachable
from lilliput.wire.prefix import GRAIN, KEY_BYTES
from lilliput.wire.request_id import checked


class AsyncInferenceSession:
    """The attention caches of some rows of tokens, on a chain of servers for blocks `[start, end)`.

    It opens with its first step, when the number of rows is known. When a server fails or leaves, others take over and
    the step goes on; `recoveries` tells. If a step fails all the same, its tokens are not in the caches, and the
    session goes on from where it was; a reordering stays done.

    :param max_length: tokens per row; may be raised later, within what the servers allow
    :param rows: sequences that reordering may make of those in the first step; at least so many as that has
    :param bid: a higher one stands earlier in the queues of full servers
    :param extend: ask for a longer session instead of raising `TooLong`
    :param on_queue: told about every change of place in a queue
    :param request_id: stands in the servers' logs, by default the remote model's; a step may bring another
    :param on_step: told where the time of each step went
    """

    def __init__(
        self,
        remote: RemoteModel,
        start: int = 0,
        end: int | None = None,
        *,
        max_length: int,
        rows: int = 1,
        bid: float = 0.0,
        extend: bool = False,
        on_queue: QueueCallback | None = None,
        request_id: str = "",
        on_step: Callable[[StepTrace], None] | None = None,
    ) -> None:
        self.remote, self.start, self.end = remote, start, remote.blocks if end is None else end
        if max_length < 1:
            raise BadRequest(f"a session's max_length must be at least 1, not {max_length}")
        if not 0 <= self.start < self.end <= remote.blocks:
            raise BadRequest(f"blocks {self.start}:{self.end} are not blocks of a model with {remote.blocks}")
        self.bid, self.extend = bid, extend
        #: identifies the session to its servers and in their logs
        self.session_id = secrets.token_bytes(8)
        self._on_queue = on_queue
        self.request_id, self.on_step = checked(request_id or remote.request_id), on_step
        self._max_length = max_length
        self._position = 0
        self._rows = 0
        #: to be told to the servers with the next step: which old row each row continues
        self._parents: list[int] | None = None
        self._closed = False
        self._busy = asyncio.Lock()
        self._chain = self._new_chain(rows)

    # -- what it is

    @property
    def history(self) -> TokenHistory:
        """The tokens in the caches."""
        return self._chain.history

    @property
    def position(self) -> int:
        """Tokens per row in the caches. Set it back to forget what lies beyond; the next step tells the servers."""
        return self._position

    @position.setter
    def position(self, position: int) -> None:
        if not 0 <= position <= self._position:
            raise BadRequest(f"the position can be set back from {self._position} to 0, not to {position}")
        self._position = position
        self.history.crop(position)

    @property
    def max_length(self) -> int:
        """Tokens per row that the session may hold. A greater one is asked for with the next step."""
        return self._max_length

    @max_length.setter
    def max_length(self, max_length: int) -> None:
        if max_length < self._position:
            raise BadRequest(f"{self._position} tokens are in the caches already")
        self._max_length = max_length

    @property
    def rows(self) -> int:
        """Sequences in the session; 0 before its first step."""
        return self._rows

    @property
    def max_rows(self) -> int:
        """Sequences that the session can hold."""
        return self._chain.max_rows

    @property
    def hops(self) -> list[Hop]:
        """The chain, once open."""
        return [leg.hop for leg in self._chain.legs]

    @property
    def stats(self) -> list[HopStats]:
        """What each server of the chain reported so far."""
        return [leg.session.stats for leg in self._chain.legs]

    @property
    def recoveries(self) -> list[Recovery]:
        """What happened to its servers so far."""
        return self._chain.recoveries

    @property
    def audits(self) -> AuditCounts:
        """What came of looking at what its servers returned, if the model is audited."""
        return self._chain.audits.counts

    @property
    def is_open(self) -> bool:
        return bool(self._chain.legs)

    # -- what it does

    async def open(self, *, prefix: bytes = b"") -> int:
        """Open the sessions of the chain, all at once. Returns how many tokens of the prefix all servers have cached.

        :param prefix: keys of the first step's tokens (see `wire.prefix`), `[max_rows, n]` digests

        Raises `MissingBlocks`, `Busy` with the expected wait, or what the last of a few chains failed with.
        """
        if self._closed:
            raise Unreachable("the session was closed")
        self._chain.max_length = self._max_length
        cached = await self._chain.open(prefix, extend=self.extend)
        self._max_length = self._chain.max_length
        return cached

    async def step(
        self,
        hidden: torch.Tensor,
        *,
        tokens: torch.Tensor | None = None,
        needed: int | None = None,
        mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        parents: Sequence[int] | None = None,
        start_position: int | None = None,
        prompts: torch.Tensor | None = None,
        request_id: str = "",
    ) -> torch.Tensor:
        """Run some tokens of every row through the chain.

        :param hidden: `[rows, tokens, hidden]`, any floating-point dtype
        :param tokens: their ids, int64 `[rows, tokens]`, if they are known: lets servers find what they have cached.
            `PADDING` where the mask hides them; only to be given if mask and position ids follow from that.
        :param needed: only the outputs of the last so many tokens are used; earlier ones need not be computed if they
            are cached. Default: all of them.
        :param mask: bool `[rows or 1, tokens, length after the step]`, true = attend. Default: causal.
        :param position_ids: int64 `[rows, tokens]`. Default: the places in the cache.
        :param parents: new row i continues old row `parents[i]`; the number of rows may change
        :param start_position: forget what lies beyond, first
        :param prompts: `[blocks, rows, tokens, hidden]`, added before each block
        :param request_id: from now on, for the servers' logs
        :returns: outputs of the last tokens, `[rows, n, hidden]` in the dtype of `hidden`; n = tokens unless `needed`
        """
        asked, moves = time.perf_counter(), self._busy.locked()
        async with self._busy:
            begun = time.perf_counter() if moves else asked
            if request_id == self.request_id:
                request_id = ""  # the servers know it
            elif request_id:
                self.request_id = self._chain.request_id = checked(request_id)
            if start_position is not None:
                self.position = start_position
            if parents is not None:
                self.reorder(parents)
            rows, count = _checked(hidden, self._position, mask, position_ids)
            if prompts is not None:
                tokens = None  # the values in the cache depend on more than the tokens
            skipped, opening = 0, 0.0
            if not self.is_open:
                skipped = await self._open_for(hidden, tokens, count if needed is None else needed)
                opening = time.perf_counter() - begun
            elif rows > self.max_rows:
                raise BadRequest(f"{rows} rows in a session with room for {self.max_rows}")
            elif self._rows and rows != self._rows:
                if self._position:
                    raise BadRequest(
                        f"{rows} rows, but the session has {self._rows}; name their parents to change that"
                    )
                self.reorder([min(row, self._rows - 1) for row in range(rows)])  # nothing there that could be mixed up
            chain, position = self._chain, self._position
            longer = self._room_for(position + count)
            parents, self._parents = self._parents, None
            if parents is not None:
                chain.reorder(parents)
            if not skipped:
                chain.rewind(position)
            known = torch.full((rows, count), UNKNOWN) if tokens is None else tokens
            whole = Part(
                hidden, position, mask, position_ids, prompts, self.start, max_length=longer, request_id=request_id
            )
            recoveries = len(chain.recoveries)
            try:
                if skipped:
                    self.history.append(known[:, :skipped])
                    cached, whole = whole.split(skipped)
                    known = known[:, skipped:]
                    chain.have(cached)
                outputs = await chain.run(whole, known)
            except BaseException:
                self.history.crop(position)
                chain.rewind(position)
                raise
            self._rows, self._position = rows, position + count
            if self.on_step is not None:
                recovering = sum(recovery.seconds for recovery in chain.recoveries[recoveries:])
                seconds = time.perf_counter() - asked
                self.on_step(
                    StepTrace(
                        count - skipped, seconds, opening, begun - asked, recovering, chain.auditing, chain.crossings
                    )
                )
            return outputs

    def reorder(self, parents: Sequence[int]) -> None:
        """From the next step on, new row i continues old row `parents[i]`."""
        parents = [int(parent) for parent in parents]
        if not self._rows:
            raise BadRequest("no rows to reorder before the first step")
        if not parents or len(parents) > self.max_rows or not all(0 <= parent < self._rows for parent in parents):
            raise BadRequest(
                f"parents {parents} must be 1 to {self.max_rows} numbers of the session's rows, 0 to {self._rows - 1}"
            )
        self._parents = parents if self._parents is None else [self._parents[parent] for parent in parents]
        self.history.reorder(parents)
        self._rows = len(parents)

    async def restart(self, rows: int | None = None) -> None:
        """Give the caches back and begin anew: the next step opens the session again, with room for so many rows."""
        chain, self._chain = self._chain, self._new_chain(self.max_rows if rows is None else rows)
        self._chain.recoveries, self._chain.audits.counts = chain.recoveries, chain.audits.counts
        self._position = self._rows = 0
        self._parents = None
        await chain.close()

    async def close(self) -> None:
        """Give the caches back. May be called twice."""
        self._closed = True
        await self.restart()

    # -- how

    def _new_chain(self, rows: int) -> Chain:
        return Chain(
            self.remote,
            self.start,
            self.end,
            busy=self._busy,
            max_length=self._max_length,
            max_rows=rows,
            bid=self.bid,
            session_id=self.session_id,
            request_id=self.request_id,
            on_queue=self._on_queue,
        )

    async def _open_for(self, hidden: torch.Tensor, tokens: torch.Tensor | None, needed: int) -> int:
        """Open for a first step; returns how many of its tokens need not be sent."""
        rows, count = hidden.shape[:2]
        self._chain.max_rows = max(self.max_rows, rows)
        usable = 0 if tokens is None else max(count - max(needed, 1), 0)
        prefix, grains = b"", 0
        if tokens is not None and usable >= GRAIN:
            keys = self.history.keys_of(tokens[:, :usable])
            grains = len(keys) // (rows * KEY_BYTES)
            prefix = for_all_rows(keys, rows, self.max_rows)
        cached = await self.open(prefix=prefix)
        self._rows = rows
        return min(cached, grains * GRAIN)

    def _room_for(self, length: int) -> int:
        """The max_length to ask the servers for with the next step; 0 if what they granted is enough."""
        sessions = [leg.session for leg in self._chain.legs]
        granted, limit = min(s.max_length for s in sessions), min(s.limit for s in sessions)
        if length > self._max_length:
            if not self.extend or length > limit:
                raise TooLong(f"{length} tokens are more than the session's max_length of {self._max_length}")
            self._max_length = min(max(length, self._max_length * 3 // 2), limit)
        self._chain.max_length = self._max_length
        return self._max_length if self._max_length > granted else 0


def _checked(
    hidden: torch.Tensor, position: int, mask: torch.Tensor | None, position_ids: torch.Tensor | None
) -> tuple[int, int]:
    """Rows and tokens of a step whose tensors can be cut into parts; the rest is for the servers to check."""
    if hidden.dim() != 3 or not hidden.numel():
        raise BadRequest(f"hidden states must be [rows, tokens, hidden], not {list(hidden.shape)}")
    rows, count = hidden.shape[:2]
    if mask is not None and (mask.dim() != 3 or mask.shape[1:] != (count, position + count)):
        raise BadRequest(f"the mask must be [{rows} or 1, {count}, {position + count}], not {list(mask.shape)}")
    if position_ids is not None and position_ids.shape != (rows, count):
        raise BadRequest(f"position ids must be [{rows}, {count}], not {list(position_ids.shape)}")
    return rows, count
