"""A session leaves a server that is about to leave: others are fed while its steps go on."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from lilliput.client.leg import Leg, close_legs
from lilliput.errors import LilliputError

if TYPE_CHECKING:
    from lilliput.client.chain import Chain

logger = logging.getLogger(__name__)

#: while nobody serves the blocks, look again after this long (seconds)
_LOOK_AGAIN_SECONDS = 0.5
#: who takes over is fed so often before the steps wait for the last tokens
_CATCH_UPS = 4


async def move(chain: Chain, leg: Leg) -> None:
    """Put others in the leg's place between two steps; try until the server is gone.

    What entered the leg is on no tape if servers pushed it. Then further sessions on the servers before make it again
    meanwhile; if those have no room, the steps wait while it is made again.
    """
    helped = True
    while leg in chain.legs and leg.session.broken is None:
        try:
            await _try(chain, leg, helped)
        except LilliputError as e:  # there is nobody yet, and perhaps there will be before it goes
            logger.info("the session on %s could not move: %s", leg.hop, e)
            await asyncio.sleep(_LOOK_AGAIN_SECONDS)
        helped = False


async def _try(chain: Chain, leg: Leg, helped: bool) -> None:
    tape, replay = chain.tape, chain.replay
    hops = await chain.hops(leg.start, leg.end, {leg.hop.peer_id})
    before: list[Leg] = []
    if helped and not tape.knows(leg.start, 0, leg.answered):
        before = chain.legs[: chain.legs.index(leg)]
    legs = await chain.open_legs([*(earlier.hop for earlier in before), *hops], b"", set())
    try:
        version, replayed = tape.version, 0
        for _ in range(_CATCH_UPS):
            if version != tape.version or not tape.knows(legs[0].start, legs[0].answered, leg.answered):
                break
            replayed += (fed := await replay.feed(legs, leg.answered, version=version))
            if fed <= 1:
                break
        async with chain.busy:
            if leg not in chain.legs:
                return
            begun = time.monotonic()
            if version != tape.version:  # rows or tokens are not what was sent
                for new in legs:
                    new.stand_at(0)
            replayed += (waited := await replay.feed(legs, leg.answered))
            await chain.take_over(
                [leg],
                legs[len(before) :],
                "it is about to leave",
                seconds=time.monotonic() - begun,
                replayed=replayed,
                waited=waited,
                moved=True,
            )
    finally:
        await close_legs([new for new in legs if new not in chain.legs])
