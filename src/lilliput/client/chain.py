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

from lilliput.client.audits import Audits, Convicted
from lilliput.client.connection import Patience
from lilliput.client.history import TokenHistory, for_all_rows
from lilliput.client.leg import Leg, close_legs, open_legs
from lilliput.client.move import Moves
from lilliput.client.recovery import Recovery
from lilliput.client.remote import RemoteModel
from lilliput.client.repair import Repair
from lilliput.client.replay import Replay
from lilliput.client.route import Hop
from lilliput.client.run import Run, linked
from lilliput.client.server_session import QueueCallback, Reply, ServerSession
from lilliput.client.step_trace import Crossing
from lilliput.client.tape import Part, Tape
from lilliput.client.tasks import all_of
from lilliput.errors import Busy, LilliputError, MissingBlocks, Unreachable

logger = logging.getLogger(__name__)

#: a longer step is cut, so that one server computes its next part while the next server computes this one
_PART_TOKENS = 512
#: bounds the bytes of one message
_PART_BYTES = 32 << 20


class Chain:
    """Legs for blocks `[start, end)`; none before `open`. Belongs to the connection's loop.

    :param busy: held while a step is under way
    :ivar max_length, max_rows: what the servers are asked for
    :ivar request_id: for their logs
    :ivar tape: what they were sent
    :ivar recoveries: what happened to them so far
    :ivar crossings: of the step that is under way, or was last
    :ivar auditing: seconds that it waited for audits
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
        request_id: str = "",
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
        self.crossings: list[Crossing] = []
        self.auditing = 0.0
        self._bid, self._session_id, self._on_queue = bid, session_id, on_queue
        self.request_id = request_id
        self.busy = busy
        self.repair, self.moves, self.audits = Repair(self), Moves(self), Audits(self)
        self._ids = itertools.count(1)
        self.closed = False

    # -- opening and closing

    async def open(self, prefix: bytes, *, extend: bool) -> int:
        """Open all sessions, at once. Returns how many tokens of the prefix all servers have cached.

        :param prefix: keys of the first tokens (see `wire.prefix`), `[max_rows, n]` digests
        :param extend: take what the servers allow rather than fail for a `max_length` that is longer

        Servers that are full say so at once: others are tried for as long as `Patience.open` allows.

        Raises `MissingBlocks`, `Busy` with the expected wait, or what the last of a few chains failed with.
        """
        failed: set[str] = set()
        error: LilliputError | None = None
        patience, loop, failures = self.remote.patience, asyncio.get_running_loop(), 0
        until = loop.time() + patience.open
        while error is None or (failures < patience.attempts and loop.time() < until):
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
                failures += not isinstance(e, Busy)
        raise error

    async def close(self) -> None:
        """Give the caches back. May be called twice."""
        self.closed = True
        legs, self.legs = self.legs, []
        self.moves.close()
        self.audits.give_up()
        await asyncio.gather(*(leg.session.close() for leg in legs))

    async def hops(self, start: int, end: int, banned: set[str]) -> list[Hop]:
        """A chain of servers for some of the blocks. Raises `MissingBlocks`."""
        return await self.remote.chain(start, end, banned=banned, pushes=self.remote.push)

    async def open_legs(
        self,
        hops: Sequence[Hop],
        prefix: bytes,
        failed: set[str],
        patience: Patience | None = None,
        max_length: int = 0,
    ) -> list[Leg]:
        """Sessions on these servers, standing at what they all have cached. Adds to `failed` who refused."""
        legs = await open_legs(
            replace(self.remote, patience=patience) if patience else self.remote,
            hops,
            failed,
            max_length=max_length or self.max_length,
            rows=self.max_rows,
            prefix=prefix,
            bid=self._bid,
            session_id=self._session_id,
            request_id=self.request_id,
            resumes=bool(self.legs),
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
        self.repair.failures = 0
        self.crossings, self.auditing = [], 0.0
        parts = list(self._cut(step, tokens))
        for part in parts:
            self.tape.append(part)
        while True:
            try:
                self.audits.check(self.legs)
                outputs = await self._run(parts)
                break
            except Convicted as convicted:
                await self._begin_again(convicted, step.begin)
            finally:
                self.audits.give_up()
        self.moves.look_around()
        return outputs

    async def _run(self, parts: Sequence[Part]) -> torch.Tensor:
        try:
            if len(parts) == 1:
                outputs = await self._pass(parts[0])
            else:
                tasks = [asyncio.create_task(self._pass(part)) for part in parts]
                outputs = torch.cat(await all_of(tasks), dim=1)
        except LilliputError:
            await self.audits.settle()  # perhaps a server called wrong what a liar had made of it
            raise
        computed = time.perf_counter()
        await self.audits.settle()
        if self.remote.audit:
            self.auditing += time.perf_counter() - computed
        return outputs

    async def _begin_again(self, convicted: Convicted, position: int) -> None:
        """What later servers were sent came of a lie: all caches are made anew, from what the first server was sent."""
        legs = list(self.legs)
        await close_legs(legs)
        for leg in legs:
            leg.stand_at(position)
        self.tape.keep_only([])
        await self.repair.repair(legs, convicted.error, convicted.leg)

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

    def part_tokens(self, rows: int, hidden: torch.Tensor, legs: Sequence[Leg] | None = None) -> int:
        """How many tokens of each row may go in one part, through all legs or through these."""
        legs = self.legs if legs is None else legs
        at_most = min([_PART_TOKENS, *(leg.session.max_step_tokens for leg in legs)])
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
                sent = time.perf_counter()
                reply = await run.compute(part)
                self.crossings.append(run.crossing(reply, time.perf_counter() - sent))
            if not await self._settled(run.legs if reply.error else run.passed(reply), part):
                for leg in run.legs:
                    leg.back_to(part.begin)
                continue
            if reply.hidden is not None:
                self.audits.draw(leg, part, reply.hidden)
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
                await self.repair.replace(failed, reply.error)
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

    # -- when others take the place of servers

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
        guilty: Leg | None = None,
    ) -> None:
        """Put legs that have been fed in the place of others. The numbers are for the `Recovery`, as is the one of
        them whose fault it is that all had to be replaced."""
        if self.closed:
            await close_legs(legs)
            raise _closed()
        first = self.legs.index(gone[0])
        self.legs[first : first + len(gone)] = legs
        self.tape.keep_only([] if self.remote.push else [leg.start for leg in self.legs])
        start, end = (guilty.start, guilty.end) if guilty else (gone[0].start, gone[-1].end)
        peers = tuple(leg.hop.peer_id for leg in legs if leg.start < end and start < leg.end)
        recovery = Recovery(start, end, (guilty or gone[0]).hop.peer_id, peers, why, seconds, replayed, waited, moved)
        self.recoveries.append(recovery)
        logger.info("%s (%s)", recovery, why, extra={"request_id": self.request_id})
        for leg in gone:
            leg.wake()
        await close_legs(gone)
        for leg in legs:
            if leg.session.leaving:
                self._server_leaves(leg.session)

    def _server_leaves(self, session: ServerSession) -> None:
        for leg in self.legs:
            if leg.session is session and not self.closed:
                self.moves.leave(leg)

    def prefix(self, length: int) -> bytes:
        """Keys of the first `length` tokens, for all rows that there may be."""
        rows = self.tape.rows
        return for_all_rows(self.history.keys(0, length, rows), rows, self.max_rows)


def _closed() -> LilliputError:
    return Unreachable("the session was closed")
