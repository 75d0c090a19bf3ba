"""A session goes over to other servers while its steps go on: they are fed first, then the chain is switched."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from lilliput.client.leg import Leg, close_legs
from lilliput.client.prospect import change, prospect
from lilliput.client.route import Hop
from lilliput.errors import LilliputError, Unreachable

if TYPE_CHECKING:
    from lilliput.client.chain import Chain

logger = logging.getLogger(__name__)

#: while nobody serves the blocks, look again after this long (seconds)
_LOOK_AGAIN_SECONDS = 0.5
#: who takes over is fed so often before the steps wait for the last tokens
_CATCH_UPS = 4
#: a move that nobody forces may not let the steps wait for more tokens than this
_WAIT_TOKENS = 64
#: after a move to a better chain the next one is looked for so many times later than usual
_REST = 4


class Moves:
    """Of one chain: from servers that are about to leave, and to better ones. Belongs to the chain's loop."""

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        self._leaving: dict[Leg, asyncio.Task[None]] = {}
        self._looking: asyncio.Task[None] | None = None
        self._steps, self._look_at = 0, math.inf

    def leave(self, leg: Leg) -> None:
        """The leg's server is about to leave: put others in its place."""
        if leg not in self._leaving:
            task = self._leaving[leg] = asyncio.create_task(self._leave(leg))
            task.add_done_callback(lambda _: self._leaving.pop(leg, None))

    def look_around(self) -> None:
        """A step has ended. Now and then, look whether there is a better chain, and go over to it if that pays."""
        self._steps += 1
        now = time.monotonic()
        if self._steps == 1:
            self._rest(1)
        elif now >= self._look_at and self._looking is None:
            self._rest(1)
            task = self._looking = asyncio.create_task(self._better())
            task.add_done_callback(self._looked)

    def close(self) -> None:
        """End all that is under way."""
        for task in (*self._leaving.values(), self._looking):
            if task is not None:
                task.cancel()

    def _rest(self, times: int) -> None:
        # not all sessions at once: servers announce every few seconds how many they have
        usual = self._chain.remote.patience.look_around
        self._look_at = time.monotonic() + times * usual * random.uniform(0.75, 1.25)

    def _looked(self, task: asyncio.Task[None]) -> None:
        self._looking = None
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("looking for a better chain failed", exc_info=error)

    # -- from a server that leaves

    async def _leave(self, leg: Leg) -> None:
        """Put others in the leg's place between two steps; try until the server is gone.

        What entered the leg is on no tape if servers pushed it. Then further sessions on the servers before make it
        again meanwhile; if those have no room, the steps wait while it is made again.
        """
        chain, helped = self._chain, True
        while leg in chain.legs and leg.session.broken is None:
            try:
                hops = await chain.hops(leg.start, leg.end, {leg.hop.peer_id})
                await self._switch([leg], hops, "it is about to leave", helped=helped)
            except LilliputError as e:  # there is nobody yet, and perhaps there will be before it goes
                logger.info("the session on %s could not move: %s", leg.hop, e)
                await asyncio.sleep(_LOOK_AGAIN_SECONDS)
            helped = False

    # -- to a better chain

    async def _better(self) -> None:
        chain = self._chain
        remote, length = chain.remote, chain.tape.length
        try:
            other = await chain.hops(chain.start, chain.end, set())
            records = {record.peer_id: record for record in await remote.connection.records(remote.name)}
            legs = list(chain.legs)
            if not legs or any(leg.hop.peer_id not in records or leg.session.leaving for leg in legs):
                return
            present = [Hop(records[leg.hop.peer_id], leg.start, leg.end) for leg in legs]
            ways = await remote.connection.round_trips([hop.record for hop in (*present, *other)], within=0.0)
            if any(ways.get(hop.peer_id) is None for hop in (*present, *other)):
                return
            found = prospect(present, other, length, round_trips=ways, pushes=remote.push)
            # as many tokens are still to come as there were, if nobody knows better
            expected = min(self._steps, chain.max_length - length)
            changed = change(present, other)
            if found is None or changed is None or not found.pays(expected):
                return
            why = f"a token is expected to take {found.then * 1e3:.0f} ms elsewhere, not {found.now * 1e3:.0f}"
            gone = legs[changed.first : changed.last]
            await self._switch(gone, changed.hops, why, helped=True, at_most=_WAIT_TOKENS)
            self._rest(_REST)
        except LilliputError as e:
            logger.info("the session stays where it is: %s", e)
            self._rest(_REST)

    # -- how

    async def _switch(
        self, gone: list[Leg], hops: Sequence[Hop], why: str, *, helped: bool, at_most: int | None = None
    ) -> None:
        """Feed sessions on `hops`, then put them in the place of legs that follow one another.

        :param helped: what is on no tape is made by further sessions on the servers before; else while steps wait
        :param at_most: do not let the steps wait for more tokens than this. Raises `Unreachable` then.
        """
        chain = self._chain
        tape, replay, first = chain.tape, chain.replay, gone[0]
        before: list[Leg] = []
        if helped and not tape.knows(first.start, 0, first.answered):
            before = chain.legs[: chain.legs.index(first)]
        patience = replace(chain.remote.patience, queue=0.0) if at_most is not None else None
        legs = await chain.open_legs([*(leg.hop for leg in before), *hops], b"", set(), patience)
        try:
            mark, replayed = tape.mark(), 0
            for _ in range(_CATCH_UPS):
                if not tape.knows(legs[0].start, legs[0].answered, first.answered):
                    break
                fed = await replay.feed(legs, first.answered, mark)
                replayed += fed
                _stand_back(legs, tape.kept(mark))
                mark = tape.mark()
                if fed <= 1:
                    break
            async with chain.busy:
                if any(leg not in chain.legs for leg in gone):
                    return
                _stand_back(legs, tape.kept(mark))
                if at_most is not None and first.answered - legs[0].answered > at_most:
                    raise Unreachable("the new servers do not catch up with the steps")
                begun = time.monotonic()
                replayed += (waited := await replay.feed(legs, first.answered))
                await chain.take_over(
                    gone,
                    legs[len(before) :],
                    why,
                    seconds=time.monotonic() - begun,
                    replayed=replayed,
                    waited=waited,
                    moved=True,
                )
        finally:
            await close_legs([leg for leg in legs if leg not in chain.legs])


def _stand_back(legs: Sequence[Leg], kept: int) -> None:
    """What these servers hold counts no further than `kept`: rows were reordered, or tokens taken back."""
    for leg in legs:
        leg.stand_at(min(leg.answered, kept))
