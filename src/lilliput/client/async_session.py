"""A session over a whole chain of servers, on the event loop of its connection.

`InferenceSession` (in `session`) is the same for callers that are not asynchronous.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence

import torch

from lilliput.client.history import UNKNOWN, TokenHistory
from lilliput.client.remote import RemoteModel
from lilliput.client.route import Hop
from lilliput.client.server_session import HopStats, QueueCallback, ServerSession
from lilliput.errors import BadRequest, LilliputError, MissingBlocks, TooLong, Unreachable
from lilliput.wire.prefix import GRAIN, KEY_BYTES

#: a longer step is cut, so that one server computes its next part while the next server computes this one
_CHUNK_TOKENS = 512
#: parts of one step that a server may have at a time
_CHUNKS_AT_ONCE = 4
#: bounds the bytes of one message
_CHUNK_BYTES = 32 << 20
#: how often a session that expired while its neighbours still queued is opened anew
_REOPENINGS = 3


class AsyncInferenceSession:
    """The attention caches of some rows of tokens, on a chain of servers for blocks `[start, end)`.

    It opens with its first step, when the number of rows is known. If a step fails, its tokens are not in the caches,
    and the session goes on from where it was unless it is `broken`; a reordering stays done.

    :param max_length: tokens per row; may be raised later, within what the servers allow
    :param rows: sequences that reordering may make of those in the first step; at least so many as that has
    :param bid: a higher one stands earlier in the queues of full servers
    :param extend: ask for a longer session instead of raising `TooLong`
    :param on_queue: told about every change of place in a queue
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
    ) -> None:
        self.remote, self.start, self.end = remote, start, remote.blocks if end is None else end
        if max_length < 1:
            raise BadRequest(f"a session's max_length must be at least 1, not {max_length}")
        if not 0 <= self.start < self.end <= remote.blocks:
            raise BadRequest(f"blocks {self.start}:{self.end} are not blocks of a model with {remote.blocks}")
        self.bid, self.extend = bid, extend
        self.history = TokenHistory(remote.salt)
        #: identifies the session to its servers and in their logs
        self.session_id = secrets.token_bytes(8)
        self._on_queue = on_queue
        self._max_length = max_length
        self._position = 0
        self._rows, self._max_rows = 0, rows
        self._hops: list[ServerSession] = []
        self._closed = False
        self._busy = asyncio.Lock()

    # -- what it is

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
        return self._max_rows

    @property
    def hops(self) -> list[Hop]:
        """The chain, once open."""
        return [hop.hop for hop in self._hops]

    @property
    def stats(self) -> list[HopStats]:
        """What each server of the chain reported so far."""
        return [hop.stats for hop in self._hops]

    @property
    def is_open(self) -> bool:
        return bool(self._hops)

    @property
    def broken(self) -> LilliputError | None:
        """Why no step can succeed any more, if so."""
        return next((hop.broken for hop in self._hops if hop.broken is not None), None)

    # -- what it does

    async def open(self, *, prefix: bytes = b"") -> int:
        """Open the sessions of the chain, all at once. Returns how many tokens of the prefix all servers have cached.

        :param prefix: keys of the first step's tokens (see `wire.prefix`), `[max_rows, n]` digests

        Raises `MissingBlocks`, `Busy` with the expected wait, or what the last of a few chains failed with.
        """
        if self._closed:
            raise Unreachable("the session was closed")
        banned: set[str] = set()
        error: LilliputError | None = None
        for _ in range(self.remote.patience.attempts):
            try:
                chain = await self.remote.chain(self.start, self.end, banned=banned)
            except MissingBlocks as e:
                raise error or e from None
            if self.extend:
                self._max_length = min([self._max_length, *(h.record.max_length for h in chain if h.record.max_length)])
            try:
                self._hops = await self._open_chain(chain, prefix, banned)
                return min(hop.cached_tokens for hop in self._hops)
            except LilliputError as e:
                if not e.retry_elsewhere:
                    raise
                error = e
        assert error is not None
        raise error

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
        :returns: outputs of the last tokens, `[rows, n, hidden]` in the dtype of `hidden`; n = tokens unless `needed`
        """
        async with self._busy:
            if self.broken is not None:
                raise self.broken
            if start_position is not None:
                self.position = start_position
            if parents is not None:
                self.reorder(parents)
            rows, count = _checked(hidden, self._position, mask, position_ids)
            if prompts is not None:
                tokens = None  # the values in the cache depend on more than the tokens
            skipped = 0
            if not self._hops:
                skipped = await self._open_for(hidden, tokens, count if needed is None else needed)
            elif rows > self._max_rows:
                raise BadRequest(f"{rows} rows in a session with room for {self._max_rows}")
            elif self._rows and rows != self._rows:
                if self._position:
                    raise BadRequest(
                        f"{rows} rows, but the session has {self._rows}; name their parents to change that"
                    )
                self.reorder([min(row, self._rows - 1) for row in range(rows)])  # nothing there that could be mixed up
            longer = self._room_for(self._position + count)
            known = torch.full((rows, count), UNKNOWN) if tokens is None else tokens
            position = self._position
            if skipped:
                self.history.append(known[:, :skipped])
                hidden, known = hidden[:, skipped:], known[:, skipped:]
                mask = None if mask is None else mask[:, skipped:]
                position_ids = None if position_ids is None else position_ids[:, skipped:]
            try:
                outputs = await self._run(
                    hidden, known, position + skipped, longer, mask, position_ids, prompts, request_id
                )
            except BaseException:
                self.history.crop(position)
                raise
            self._rows, self._position = rows, position + count
            return outputs

    def reorder(self, parents: Sequence[int]) -> None:
        """From the next step on, new row i continues old row `parents[i]`."""
        parents = [int(parent) for parent in parents]
        if not self._rows:
            raise BadRequest("no rows to reorder before the first step")
        if not parents or len(parents) > self._max_rows or not all(0 <= parent < self._rows for parent in parents):
            raise BadRequest(
                f"parents {parents} must be 1 to {self._max_rows} numbers of the session's rows, 0 to {self._rows - 1}"
            )
        for hop in self._hops:
            hop.reorder(parents)
        self.history.reorder(parents)
        self._rows = len(parents)

    async def restart(self, rows: int | None = None) -> None:
        """Give the caches back and begin anew: the next step opens the session again, with room for so many rows."""
        self._max_rows = self._max_rows if rows is None else rows
        hops, self._hops = self._hops, []
        self._position = self._rows = 0
        self.history = TokenHistory(self.remote.salt)
        await asyncio.gather(*(hop.close() for hop in hops))

    async def close(self) -> None:
        """Give the caches back. May be called twice."""
        self._closed = True
        await self.restart()

    # -- how

    async def _open_for(self, hidden: torch.Tensor, tokens: torch.Tensor | None, needed: int) -> int:
        """Open for a first step; returns how many of its tokens need not be sent."""
        rows, count = hidden.shape[:2]
        self._max_rows = max(self._max_rows, rows)
        usable = 0 if tokens is None else max(count - max(needed, 1), 0)
        prefix, grains = b"", 0
        if tokens is not None and usable >= GRAIN:
            keys = self.history.keys_of(tokens[:, :usable])
            grains = len(keys) // (rows * KEY_BYTES)
            # every row of the session gets a prefix; those that are not in the first step are made from it later
            prefix = keys + keys[len(keys) - grains * KEY_BYTES :] * (self._max_rows - rows)
        cached = await self.open(prefix=prefix)
        self._rows = rows
        return min(cached, grains * GRAIN)

    async def _open_chain(self, chain: Sequence[Hop], prefix: bytes, failed: set[str]) -> list[ServerSession]:
        """Sessions on all servers of the chain, or none. Adds to `failed` who refused."""
        opened: dict[Hop, ServerSession] = {}

        async def open_one(hop: Hop) -> None:
            try:
                opened[hop] = await ServerSession.open(
                    self.remote,
                    hop,
                    max_length=self._max_length,
                    rows=self._max_rows,
                    prefix=prefix,
                    bid=self.bid,
                    session_id=self.session_id,
                    on_queue=self._on_queue,
                )
            except LilliputError as e:
                failed.add(hop.peer_id)
                if isinstance(e, Unreachable):
                    self.remote.connection.ban(hop.peer_id)
                raise

        try:
            for _ in range(_REOPENINGS):
                # one that was accepted at once may expire while another is still in a queue
                due = [hop for hop in chain if hop not in opened or opened[hop].broken is not None]
                if not due:
                    break
                results = await asyncio.gather(*map(open_one, due), return_exceptions=True)
                errors = [result for result in results if isinstance(result, BaseException)]
                if errors:
                    raise errors[0]
            return [opened[hop] for hop in chain]
        except BaseException:
            await asyncio.gather(*(session.close() for session in opened.values()))
            raise

    def _room_for(self, length: int) -> int:
        """The max_length to ask the servers for with the next step; 0 if what they granted is enough."""
        granted = min(hop.max_length for hop in self._hops)
        limit = min(hop.limit for hop in self._hops)
        if length > self._max_length:
            if not self.extend or length > limit:
                raise TooLong(f"{length} tokens are more than the session's max_length of {self._max_length}")
            self._max_length = min(max(length, self._max_length * 3 // 2), limit)
        return self._max_length if self._max_length > granted else 0

    async def _run(
        self,
        hidden: torch.Tensor,
        tokens: torch.Tensor,
        position: int,
        longer: int,
        mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        prompts: torch.Tensor | None,
        request_id: str,
    ) -> torch.Tensor:
        rows, count = hidden.shape[:2]
        first_position, dtype = position, hidden.dtype
        chunk = self._chunk_tokens(hidden)
        if count <= chunk and mask is None and position_ids is None and prompts is None:  # nearly always
            hashes = self.history.append(tokens)
            for hop in self._hops:
                hidden = await hop.step(
                    hidden, position=position, hashes=hashes, max_length=longer, request_id=request_id
                )
            return _as(hidden, rows, count, dtype, self._hops[-1])

        turns = [asyncio.Lock() for _ in self._hops]
        slots = [asyncio.Semaphore(_CHUNKS_AT_ONCE) for _ in self._hops]

        async def run_chunk(begin: int, end: int, hashes: bytes) -> torch.Tensor:
            part = hidden[:, begin:end]
            extras: dict[str, torch.Tensor] = {}
            if mask is not None:
                extras["mask"] = mask[:, begin:end, : first_position + end]
            if position_ids is not None:
                extras["position_ids"] = position_ids[:, begin:end]
            for hop, turn, slot in zip(self._hops, turns, slots, strict=True):
                if prompts is not None:
                    blocks = slice(hop.hop.start - self.start, hop.hop.end - self.start)
                    extras["prompts"] = prompts[blocks, :, begin:end]
                async with turn:  # outputs come in order, and so does whoever waits for the lock
                    await slot.acquire()
                    try:
                        await hop.drain()
                        answer = hop.send(
                            part,
                            position=first_position + begin,
                            tensors=extras,
                            hashes=hashes,
                            max_length=longer if begin == 0 else 0,
                            request_id=request_id,
                        )
                    except BaseException:
                        slot.release()
                        raise
                try:
                    part = await answer
                finally:
                    slot.release()
            return _as(part, rows, end - begin, dtype, self._hops[-1])

        tasks = []
        for begin in range(0, count, chunk):
            end = min(begin + chunk, count)
            tasks.append(asyncio.create_task(run_chunk(begin, end, self.history.append(tokens[:, begin:end]))))
        try:
            return torch.cat(await asyncio.gather(*tasks), dim=1)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    def _chunk_tokens(self, hidden: torch.Tensor) -> int:
        rows = hidden.shape[0]
        at_most = min(_CHUNK_TOKENS, min(hop.max_step_tokens for hop in self._hops))
        by_bytes = _CHUNK_BYTES // (rows * hidden.shape[2] * hidden.element_size())
        return max(1, min(at_most // rows, by_bytes))


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


def _as(hidden: torch.Tensor, rows: int, tokens: int, dtype: torch.dtype, hop: ServerSession) -> torch.Tensor:
    if hidden.shape[:2] != (rows, tokens):
        raise Unreachable(f"server {hop.hop} returned {list(hidden.shape)} for {rows} rows of {tokens} tokens")
    return hidden.to(dtype)
