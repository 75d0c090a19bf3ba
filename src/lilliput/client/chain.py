"""The servers that together cover a session's blocks, and how others take their places.

A chain is a list of legs, one session on one server each. A part of a step is sent to the first of them; each server
pushes its outputs to the next, and the last one answers. Where a server cannot reach the next one, the part comes back
and is carried there. Where a server fails, the part waits until its blocks are served again, and is sent once more from
where it last was here. Whoever takes over is fed what the lost server had been sent (see `replay`).

Parts follow one another, and a failure may make later ones fail, or pass where they should not. So what comes of a part
counts only when all earlier ones have been answered wherever it went, and none of them has been taken back.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from lilliput.client.connection import Patience
from lilliput.client.history import TokenHistory, for_all_rows
from lilliput.client.leg import Leg, close_legs, open_legs
from lilliput.client.move import move
from lilliput.client.recovery import Recovery, why_nobody
from lilliput.client.remote import RemoteModel
from lilliput.client.replay import Replay
from lilliput.client.route import Hop
from lilliput.client.run import Run, linked
from lilliput.client.server_session import QueueCallback, Reply, ServerSession
from lilliput.client.tape import Part, Tape
from lilliput.client.tasks import all_of
from lilliput.errors import CacheFull, LilliputError, MissingBlocks, SessionExpired, Unreachable

logger = logging.getLogger(__name__)

#: a longer step is cut, so that one server computes its next part while the next server computes this one
_PART_TOKENS = 512
#: bounds the bytes of one message
_PART_BYTES = 32 << 20
#: while nobody serves some blocks, look again after this long (seconds)
_LOOK_AGAIN_SECONDS = 0.5
#: who failed is asked again after this long, if there is nobody else (seconds)
_FORGIVE_SECONDS = 5.0


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
        # with push, hidden states between servers do not come by, and whoever needs some lets them be made again
        self.tape = Tape(start, 0 if remote.push else remote.replay_bytes)
        self.replay = Replay(self)
        self.legs: list[Leg] = []
        self.recoveries: list[Recovery] = []
        self._bid, self._session_id, self._on_queue = bid, session_id, on_queue
        self.busy, self._repairing = busy, asyncio.Lock()
        self._ids = itertools.count(1)
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
                hops = await self.hops(self.start, self.end, failed)
            except MissingBlocks as e:
                raise error or e from None
            if extend:
                limits = [hop.record.max_length for hop in hops if hop.record.max_length]
                self.max_length = min([self.max_length, *limits])
            try:
                self.legs = await self.open_legs(hops, prefix, failed)
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

    async def hops(self, start: int, end: int, banned: set[str]) -> list[Hop]:
        """A chain of servers for some of the blocks. Raises `MissingBlocks`."""
        return await self.remote.chain(start, end, banned=banned, pushes=self.remote.push)

    async def open_legs(
        self, hops: Sequence[Hop], prefix: bytes, failed: set[str], patience: Patience | None = None
    ) -> list[Leg]:
        """Sessions on these servers, standing at what they all have cached. Adds to `failed` who refused."""
        legs = await open_legs(
            replace(self.remote, patience=patience) if patience else self.remote,
            hops,
            failed,
            max_length=self.max_length,
            rows=self.max_rows,
            prefix=prefix,
            bid=self._bid,
            session_id=self._session_id,
            on_queue=self._on_queue,
            ids=self._ids,
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
        return torch.cat(await all_of(tasks), dim=1)

    def _cut(self, step: Part, tokens: torch.Tensor) -> Iterator[Part]:
        count, size = step.hidden.shape[1], self.part_tokens(step.rows, step.hidden)
        if count <= size:
            step.hashes = self.history.append(tokens)
            yield step
            return
        for begin in range(0, count, size):
            part = step.cut(begin, min(begin + size, count))
            part.hashes = self.history.append(tokens[:, begin : begin + size])
            part.max_length = step.max_length if begin == 0 else 0
            yield part

    def part_tokens(self, rows: int, hidden: torch.Tensor) -> int:
        """How many tokens of each row may go in one part."""
        at_most = min([_PART_TOKENS, *(leg.session.max_step_tokens for leg in self.legs)])
        by_bytes = _PART_BYTES // (rows * hidden.shape[2] * hidden.element_size())
        return max(1, min(at_most // rows, by_bytes))

    async def _pass(self, part: Part) -> torch.Tensor:
        """A part through all legs, whatever happens to them on the way."""
        block, push = self.start, self.remote.push and part.prompts is None
        while block < self.end:
            leg = next((leg for leg in self.legs if leg.start == block), None)
            if leg is None:
                raise _closed()
            if not leg.takes(part.begin, None):  # earlier parts go first
                await leg.changed()
                continue
            async with leg.places:
                await leg.session.drain()
                if leg not in self.legs or not leg.takes(part.begin, None):
                    continue
                self.tape.write(block, part)
                run = self._run_from(leg, part) if push else Run([leg])
                reply = await run.compute(part)
            if not await self._settled(run.legs if reply.error else run.passed(reply), part):
                for leg in run.legs:
                    leg.back_to(part.begin)
                continue
            if reply.hidden is not None:
                block = self._move_on(run, reply, part)
                part = replace(part, hidden=reply.hidden)
                continue
            assert reply.error is not None
            failed = run.passed(reply)[-1]
            for leg in run.legs:
                leg.back_to(part.begin)
            if len(run.legs) > 1 and not reply.error.retry_elsewhere:
                push = False  # it may be another's fault: carried from server to server, it shows whose
            else:
                await self._replace(failed, reply.error)
        return part.hidden

    def _run_from(self, leg: Leg, part: Part) -> Run:
        """As many legs as can push to one another."""
        legs = [leg]
        for after in self.legs[self.legs.index(leg) + 1 :]:
            peers = legs[-1].hop.peer_id, after.hop.peer_id
            if not (linked(legs[-1], after, part) and self.remote.connection.linked(*peers)):
                break
            legs.append(after)
        return Run(legs)

    async def _settled(self, legs: Sequence[Leg], part: Part) -> bool:
        """Wait until it is known what became of all earlier parts at these legs.

        True if what came of this one counts. If one of the legs failed or missed an earlier part, it does not: then
        the part is to be sent once more, from where it last was.
        """

        def unsettled(leg: Leg) -> bool:
            return leg in self.legs and leg.sent >= part.end and leg.answered < part.begin

        while (leg := next(filter(unsettled, legs), None)) is not None:
            await leg.changed()
        return all(leg in self.legs and leg.sent >= part.end for leg in legs)

    def _move_on(self, run: Run, reply: Reply, part: Part) -> int:
        """A part has been answered; returns the block that it comes to next."""
        passed = run.passed(reply)
        for leg in passed:
            leg.answered = part.end
            leg.wake()
        if missed := run.legs[len(passed) :]:
            self.remote.connection.unlink(passed[-1].hop.peer_id, missed[0].hop.peer_id)
            for leg in missed:
                leg.back_to(part.begin)
        return passed[-1].end

    # -- when a server fails

    async def _replace(self, leg: Leg, error: LilliputError) -> None:
        async with self._repairing:
            if leg in self.legs:
                await self.repair(self._gone_with(leg), error)

    async def repair(self, gone: list[Leg], error: LilliputError) -> None:
        """Put others in the place of legs that failed. Raises `error`, `MissingBlocks` or `Busy` if nobody can.

        A leg whose server only has no room to let the session grow is not lost: it is replaced if others have room at
        once, and nobody is waited for.
        """
        patience = self.remote.patience
        if lives := isinstance(error, CacheFull):
            patience = replace(patience, queue=0.0, recovery=0.0)
        self._failures += 1
        given_up = self._closed or self.remote.connection.closed
        # every server may have forgotten us, each for itself
        attempts = patience.attempts + (len(self.legs) if isinstance(error, SessionExpired) else 0)
        if given_up or not error.retry_elsewhere or self._failures > attempts:
            raise error
        begun, length = time.monotonic(), gone[0].answered
        failed: dict[str, float] = {}
        if not isinstance(error, SessionExpired):  # that one has only forgotten us
            failed.update((lost.hop.peer_id, begun) for lost in gone)
        if isinstance(error, Unreachable):
            for lost in gone:
                self.remote.connection.ban(lost.hop.peer_id)
        refusal: LilliputError | None = None
        while True:
            refused: set[str] = set()
            try:
                banned = {peer for peer, at in failed.items() if time.monotonic() - at < _FORGIVE_SECONDS}
                hops = await self.hops(gone[0].start, gone[-1].end, banned)
                legs = await self.open_legs(hops, self._prefix(length), refused, patience)
                replayed = await self.replay.feed(legs, length, refused)
                break
            except LilliputError as e:
                failed.update(dict.fromkeys(refused, time.monotonic()))
                if not isinstance(e, MissingBlocks):
                    refusal = e
                if self._closed or not e.retry_elsewhere or time.monotonic() - begun >= patience.recovery:
                    if lives:
                        raise error from None
                    raise why_nobody(e, refusal, error) from error
                if isinstance(e, MissingBlocks):
                    await asyncio.sleep(_LOOK_AGAIN_SECONDS)
        seconds = time.monotonic() - begun
        await self.take_over(gone, legs, str(error), seconds=seconds, replayed=replayed, waited=replayed)

    def _gone_with(self, leg: Leg) -> list[Leg]:
        """The leg and those next to it that failed too, as far as no part is between them."""

        def failed_too(other: Leg) -> bool:
            return other.session.broken is not None and other.idle and other.answered == leg.answered

        at = self.legs.index(leg)
        before = list(itertools.takewhile(failed_too, reversed(self.legs[:at])))
        return [*reversed(before), leg, *itertools.takewhile(failed_too, self.legs[at + 1 :])]

    async def take_over(
        self,
        gone: list[Leg],
        legs: list[Leg],
        why: str,
        *,
        seconds: float,
        replayed: int,
        waited: int,
        moved: bool = False,
    ) -> None:
        """Put legs that have been fed in the place of others. The numbers are for the `Recovery`."""
        if self._closed:
            await close_legs(legs)
            raise _closed()
        first = self.legs.index(gone[0])
        self.legs[first : first + len(gone)] = legs
        self.tape.keep_only([] if self.remote.push else [leg.start for leg in self.legs])
        peers = tuple(leg.hop.peer_id for leg in legs)
        lost = gone[0].start, gone[-1].end, gone[0].hop.peer_id
        recovery = Recovery(*lost, peers, why, seconds, replayed, waited, moved)
        self.recoveries.append(recovery)
        logger.info("%s (%s)", recovery, why)
        for leg in gone:
            leg.wake()
        await close_legs(gone)
        for leg in legs:
            if leg.session.leaving:
                self._server_leaves(leg.session)

    def _prefix(self, length: int) -> bytes:
        """Keys of the first `length` tokens, for all rows that there may be."""
        rows = self.tape.rows
        return for_all_rows(self.history.keys(0, length, rows), rows, self.max_rows)

    # -- when a server is about to leave

    def _server_leaves(self, session: ServerSession) -> None:
        for leg in self.legs:
            if leg.session is session and leg.moving is None and not self._closed:
                leg.moving = asyncio.create_task(move(self, leg))


def _closed() -> LilliputError:
    return Unreachable("the session was closed")
