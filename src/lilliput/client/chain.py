"""The servers that together cover a session's blocks, and how others take their places.

A chain is a list of legs, one session on one server each. A part of a step goes from leg to leg; where one fails, it
waits until that leg's blocks are served again, and goes on there: whoever takes over is fed what the lost server had
been sent (see `tape`), in parts that follow one another, but for what it finds in its own cache. Outputs that came
before the failure stand; no server that lives computes anything twice.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from lilliput.client.history import TokenHistory
from lilliput.client.leg import Leg, open_legs
from lilliput.client.remote import RemoteModel
from lilliput.client.route import Hop
from lilliput.client.server_session import QueueCallback, ServerSession
from lilliput.client.tape import Part, Tape
from lilliput.errors import LilliputError, MissingBlocks, SessionExpired, Unreachable

logger = logging.getLogger(__name__)
T = TypeVar("T")

#: a longer step is cut, so that one server computes its next part while the next server computes this one
_PART_TOKENS = 512
#: bounds the bytes of one message
_PART_BYTES = 32 << 20
#: while nobody serves some blocks, look again after this long (seconds)
_LOOK_AGAIN_SECONDS = 0.5
#: who failed is asked again after this long, if there is nobody else (seconds)
_FORGIVE_SECONDS = 5.0
#: who takes over from a server that leaves is fed so often before the steps wait for the last tokens
_CATCH_UPS = 4
#: where a leg stands that no part may be sent to
_TAKES_NONE = -1


@dataclass(frozen=True)
class Recovery:
    """Blocks that went from one server to others.

    :ivar why: what the server that had them did, in words
    :ivar seconds: that a step waited for it
    :ivar replayed_tokens: per row, computed anew
    :ivar moved: the server was about to leave, and others were ready before it did
    """

    start: int
    end: int
    peer_id: str
    new_peer_ids: tuple[str, ...]
    why: str
    seconds: float
    replayed_tokens: int
    moved: bool = False

    def __str__(self) -> str:
        new = " and ".join(peer[-8:] for peer in self.new_peer_ids)
        return f"blocks {self.start}:{self.end} went from {self.peer_id[-8:]} to {new} in {self.seconds:.2f} s"


class Chain:
    """Legs for blocks `[start, end)`; none before `open`. Belongs to the connection's loop.

    :param busy: held while a step is under way
    :ivar max_length, max_rows: what the servers are asked for
    """

    def __init__(
        self,
        remote: RemoteModel,
        start: int,
        end: int,
        *,
        busy: asyncio.Lock,
        max_length: int,
        max_rows: int,
        bid: float,
        session_id: bytes,
        on_queue: QueueCallback | None,
    ) -> None:
        self.remote, self.start, self.end = remote, start, end
        self.max_length, self.max_rows = max_length, max_rows
        self.history = TokenHistory(remote.salt)
        self.tape = Tape(start, remote.replay_bytes)
        self.legs: list[Leg] = []
        self.recoveries: list[Recovery] = []
        self._bid, self._session_id, self._on_queue = bid, session_id, on_queue
        self._busy, self._repairing = busy, asyncio.Lock()
        self._failures = 0
        self._closed = False

    # -- opening and closing

    async def open(self, prefix: bytes, *, extend: bool) -> int:
        """Open all sessions, at once. Returns how many tokens of the prefix all servers have cached.

        :param prefix: keys of the first tokens (see `wire.prefix`), `[max_rows, n]` digests
        :param extend: take what the servers allow rather than fail for a `max_length` that is longer

        Raises `MissingBlocks`, `Busy` with the expected wait, or what the last of a few chains failed with.
        """
        failed: set[str] = set()
        error: LilliputError | None = None
        for _ in range(self.remote.patience.attempts):
            try:
                hops = await self.remote.chain(self.start, self.end, banned=failed)
            except MissingBlocks as e:
                raise error or e from None
            if extend:
                limits = [hop.record.max_length for hop in hops if hop.record.max_length]
                self.max_length = min([self.max_length, *limits])
            try:
                self.legs = await self._open_legs(hops, prefix, failed)
                return self.legs[0].answered
            except LilliputError as e:
                if not e.retry_elsewhere:
                    raise
                error = e
        assert error is not None
        raise error

    async def close(self) -> None:
        """Give the caches back. May be called twice."""
        self._closed = True
        legs, self.legs = self.legs, []
        for leg in legs:
            if leg.moving is not None:
                leg.moving.cancel()
        await asyncio.gather(*(leg.session.close() for leg in legs))

    async def _open_legs(self, hops: Sequence[Hop], prefix: bytes, failed: set[str]) -> list[Leg]:
        legs = await open_legs(
            self.remote,
            hops,
            failed,
            max_length=self.max_length,
            rows=self.max_rows,
            prefix=prefix,
            bid=self._bid,
            session_id=self._session_id,
            on_queue=self._on_queue,
        )
        cached = min(leg.session.cached_tokens for leg in legs)
        for leg in legs:
            leg.session.on_leaving = self._server_leaves
            leg.stand_at(cached)
        return legs

    # -- steps

    def have(self, part: Part) -> None:
        """All servers have these tokens in their caches already."""
        self.tape.append(part)
        for leg in self.legs:
            leg.stand_at(part.end)

    def reorder(self, parents: Sequence[int]) -> None:
        """From the next step on, new row i continues old row `parents[i]`."""
        self.tape.reorder(parents)
        for leg in self.legs:
            leg.session.reorder(parents)

    def rewind(self, position: int) -> None:
        """Forget what lies beyond `position`; the next step tells the servers."""
        self.tape.crop(position)
        for leg in self.legs:
            leg.stand_at(min(leg.answered, position))

    async def run(self, step: Part, tokens: torch.Tensor) -> torch.Tensor:
        """A step, cut into parts, through the whole chain; returns its outputs, of the shape of its inputs."""
        self._failures = 0
        parts = list(self._cut(step, tokens))
        for part in parts:
            self.tape.append(part)
        if len(parts) == 1:
            return await self._pass(parts[0])
        tasks = [asyncio.create_task(self._pass(part)) for part in parts]
        return torch.cat(await _all(tasks), dim=1)

    def _cut(self, step: Part, tokens: torch.Tensor) -> Iterator[Part]:
        count, size = step.hidden.shape[1], self._part_tokens(step.rows, step.hidden)
        if count <= size:
            step.hashes = self.history.append(tokens)
            yield step
            return
        for begin in range(0, count, size):
            part = step.cut(begin, min(begin + size, count))
            part.hashes = self.history.append(tokens[:, begin : begin + size])
            part.max_length = step.max_length if begin == 0 else 0
            yield part

    def _part_tokens(self, rows: int, hidden: torch.Tensor) -> int:
        at_most = min([_PART_TOKENS, *(leg.session.max_step_tokens for leg in self.legs)])
        by_bytes = _PART_BYTES // (rows * hidden.shape[2] * hidden.element_size())
        return max(1, min(at_most // rows, by_bytes))

    async def _pass(self, part: Part) -> torch.Tensor:
        """A part through all legs, whatever happens to them on the way."""
        block = self.start
        while block < self.end:
            leg = next((leg for leg in self.legs if leg.start == block), None)
            if leg is None:
                raise _closed()
            if leg.sent != part.begin:  # earlier parts go first
                await leg.changed()
                continue
            self.tape.write(block, part)
            try:
                output = await leg.compute(part)
            except LilliputError as e:
                # an earlier part may have failed, and this one because of it
                while leg in self.legs and leg.answered != part.begin:
                    await leg.changed()
                await self._replace(leg, e)
                continue
            part, block = replace(part, hidden=output), leg.end
        return part.hidden

    # -- when a server fails

    async def _replace(self, leg: Leg, error: LilliputError) -> None:
        async with self._repairing:
            if leg in self.legs:
                await self._repair(leg, error)

    async def _repair(self, leg: Leg, error: LilliputError) -> None:
        """Put others in the place of a leg that failed. Raises `error`, `MissingBlocks` or `Busy` if nobody can."""
        patience = self.remote.patience
        self._failures += 1
        given_up = self._closed or self.remote.connection.closed
        if given_up or not error.retry_elsewhere or self._failures > patience.attempts:
            raise error
        begun = time.monotonic()
        gone = self._gone_with(leg)
        failed: dict[str, float] = {}
        if not isinstance(error, SessionExpired):  # that one has only forgotten us
            failed.update((lost.hop.peer_id, begun) for lost in gone)
        if isinstance(error, Unreachable):
            self.remote.connection.ban(leg.hop.peer_id)
        refusal: LilliputError | None = None
        while True:
            refused: set[str] = set()
            try:
                banned = {peer for peer, at in failed.items() if time.monotonic() - at < _FORGIVE_SECONDS}
                hops = await self.remote.chain(leg.start, gone[-1].end, banned=banned)
                legs = await self._open_legs(hops, self._prefix(leg.answered), refused)
                replayed = await self._feed(legs, leg.answered, refused)
                break
            except LilliputError as e:
                failed.update(dict.fromkeys(refused, time.monotonic()))
                if not isinstance(e, MissingBlocks):
                    refusal = e
                if self._closed or not e.retry_elsewhere or time.monotonic() - begun >= patience.recovery:
                    raise _why(e, refusal, error) from error
                if isinstance(e, MissingBlocks):
                    await asyncio.sleep(_LOOK_AGAIN_SECONDS)
        await self._take_over(gone, legs, str(error), time.monotonic() - begun, replayed)

    def _gone_with(self, leg: Leg) -> list[Leg]:
        """The leg and those after it that failed too, as far as no part is between them."""
        first = last = self.legs.index(leg)
        while last + 1 < len(self.legs):
            after = self.legs[last + 1]
            if after.session.broken is None or not after.idle or after.answered != leg.answered:
                break
            last += 1
        return self.legs[first : last + 1]

    async def _take_over(
        self, gone: list[Leg], legs: list[Leg], why: str, seconds: float, replayed: int, moved: bool = False
    ) -> None:
        if self._closed:
            await _close(legs)
            raise _closed()
        first = self.legs.index(gone[0])
        self.legs[first : first + len(gone)] = legs
        self.tape.keep_only([leg.start for leg in self.legs])
        peers = tuple(leg.hop.peer_id for leg in legs)
        recovery = Recovery(gone[0].start, gone[-1].end, gone[0].hop.peer_id, peers, why, seconds, replayed, moved)
        self.recoveries.append(recovery)
        logger.info("%s (%s)", recovery, why)
        for leg in gone:
            leg.wake()
        await _close(gone)
        for leg in legs:
            if leg.session.leaving:
                self._server_leaves(leg.session)

    async def _feed(
        self, legs: list[Leg], length: int, failed: set[str] | None = None, version: int | None = None
    ) -> int:
        """Bring new legs to `length`; returns the tokens per row that they computed. If they fail, they are closed.

        :param failed: gets the peers that failed
        :param version: stop when the tape has another one
        """
        try:
            block, at = legs[0].start, min(leg.answered for leg in legs)
            if not self.tape.knows(block, at, length):
                await self._make_again(block, at)
            await self._play(legs, at, length, version)
            return length - at
        except BaseException:
            if failed is not None:
                failed.update(leg.hop.peer_id for leg in legs if leg.session.broken or not leg.idle)
            await _close(legs)
            raise

    async def _play(self, legs: list[Leg], begin: int, end: int, version: int | None = None) -> None:
        """Send what is on the tape through legs that follow one another."""

        async def through(begin: int, end: int, rows: int) -> None:
            while legs[0].sent != begin:
                await legs[0].changed()
            if version is not None and version != self.tape.version:
                return
            part = self.tape.play(legs[0].start, begin, end, rows=rows)
            part.hashes = self.history.keys(begin, end, rows) if version is None else b""
            for leg in legs:
                while leg.sent != begin:
                    await leg.changed()
                if leg is not legs[0] and (version is None or version == self.tape.version):
                    self.tape.write(leg.start, part)
                part = replace(part, hidden=await leg.compute(part))
            if legs[-1].end < self.end and not self.tape.knows(legs[-1].end, begin, end) and version is None:
                self.tape.write(legs[-1].end, part, needed=True)

        for leg in legs:
            leg.stand_at(begin)
        tasks = [asyncio.create_task(through(*part)) for part in self._replay_parts(begin, end)]
        await _all(tasks)

    def _replay_parts(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """First token, last token, and rows: tokens that all rows share are sent for one of them."""
        if begin >= end:
            return
        rows = self.tape.rows
        shared = min(self.tape.shared, end) if rows > 1 else 0
        hidden = self.tape.play(self.start, begin, begin + 1).hidden
        while begin < end:
            sent, until = (1, shared) if begin < shared else (rows, end)
            stop = min(begin + self._part_tokens(sent, hidden), until)
            yield begin, stop, sent
            begin = stop

    async def _make_again(self, block: int, begin: int) -> None:
        """Hidden states before `block`, from token `begin` on: the server before it computes them once more."""
        while True:
            before = next(leg for leg in self.legs if leg.end == block)
            if before.session.broken is None:
                break
            await self._repair(before, before.session.broken)
        while not before.idle:
            await before.changed()
        stands = before.answered
        before.stand_at(_TAKES_NONE)
        try:
            if not self.tape.knows(before.start, begin, stands):
                await self._make_again(before.start, begin)
            await self._play([before], begin, stands)
        except BaseException:
            before.stand_at(stands)
            await before.session.close()  # nobody knows what is in its cache now
            raise

    def _prefix(self, length: int) -> bytes:
        """Keys of the first `length` tokens, for all rows that there may be."""
        rows = self.tape.rows
        keys = self.history.keys(0, length, rows)
        each = len(keys) // rows if rows else 0
        return keys + keys[len(keys) - each :] * (self.max_rows - rows) if each else b""

    # -- when a server is about to leave

    def _server_leaves(self, session: ServerSession) -> None:
        for leg in self.legs:
            if leg.session is session and leg.moving is None and not self._closed:
                leg.moving = asyncio.create_task(self._move(leg))

    async def _move(self, leg: Leg) -> None:
        """Feed others while the steps go on, then put them in the leg's place between two steps."""
        while leg in self.legs and leg.session.broken is None:
            legs: list[Leg] = []
            try:
                hops = await self.remote.chain(leg.start, leg.end, banned={leg.hop.peer_id})
                legs = await self._open_legs(hops, b"", set())
                version, replayed = self.tape.version, 0
                for _ in range(_CATCH_UPS):
                    if version != self.tape.version or not self.tape.knows(leg.start, legs[0].answered, leg.answered):
                        break
                    replayed += (fed := await self._feed(legs, leg.answered, version=version))
                    if fed <= 1:
                        break
                async with self._busy:
                    if leg in self.legs:
                        begun = time.monotonic()
                        if version != self.tape.version:  # rows or tokens are not what was sent
                            for new in legs:
                                new.stand_at(0)
                        replayed += await self._feed(legs, leg.answered)
                        seconds = time.monotonic() - begun
                        await self._take_over([leg], legs, "it is about to leave", seconds, replayed, moved=True)
            except LilliputError as e:  # there is nobody yet, and perhaps there will be before it goes
                logger.info("the session on %s could not move: %s", leg.hop, e)
                await asyncio.sleep(_LOOK_AGAIN_SECONDS)
            finally:
                await _close([new for new in legs if new not in self.legs])


def _closed() -> LilliputError:
    return Unreachable("the session was closed")


def _why(error: LilliputError, refusal: LilliputError | None, first: LilliputError) -> LilliputError:
    """What to say when nobody takes over: who refused, or else which blocks nobody has and what became of them."""
    if not isinstance(error, MissingBlocks):
        return error
    if refusal is not None and not isinstance(refusal, Unreachable):
        return refusal
    return MissingBlocks(f"{error} ({first})", error.blocks)


async def _close(legs: Sequence[Leg]) -> None:
    await asyncio.gather(*(leg.session.close() for leg in legs))


async def _all(tasks: Sequence[asyncio.Task[T]]) -> list[T]:
    """Results in order; the first error ends them all."""
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
