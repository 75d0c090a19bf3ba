"""When servers of a chain fail, others take their places."""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from lilliput.client.leg import Leg
from lilliput.client.recovery import why_nobody
from lilliput.errors import CacheFull, LilliputError, MissingBlocks, SessionExpired, Unreachable, WrongAnswer

if TYPE_CHECKING:
    from lilliput.client.chain import Chain

#: while nobody serves some blocks, look again after this long (seconds)
_LOOK_AGAIN_SECONDS = 0.5
#: who failed is asked again after this long, if there is nobody else (seconds)
_FORGIVE_SECONDS = 5.0


class Repair:
    """Finds and feeds replacements. Belongs to the chain.

    :ivar failures: of servers, within the step that is under way
    """

    def __init__(self, chain: Chain) -> None:
        self._chain, self._repairing = chain, asyncio.Lock()
        self.failures = 0

    async def replace(self, leg: Leg, error: LilliputError) -> None:
        """Put others in the place of a leg that failed, and of its neighbours that did. Raises as `repair` does."""
        async with self._repairing:
            if leg in self._chain.legs:
                await self.repair(self._gone_with(leg), error)

    async def repair(self, gone: list[Leg], error: LilliputError, guilty: Leg | None = None) -> None:
        """Put others in the place of legs that failed. Raises `error`, `MissingBlocks` or `Busy` if nobody can.

        :param guilty: the one whose fault it is that all of them have to be replaced; default: the first

        A leg whose server only has no room to let the session grow is not lost: it is replaced if others have room at
        once, and nobody is waited for.
        """
        chain = self._chain
        connection, patience = chain.remote.connection, chain.remote.patience
        if lives := isinstance(error, CacheFull):
            patience = replace(patience, queue=0.0, recovery=0.0)
        self.failures += 1
        given_up = chain.closed or connection.closed
        # every server may have forgotten us, each for itself
        attempts = patience.attempts + (len(chain.legs) if isinstance(error, SessionExpired) else 0)
        if given_up or not error.retry_elsewhere or self.failures > attempts:
            raise error
        begun, length = time.monotonic(), gone[0].answered
        failed: dict[str, float] = {}
        if not isinstance(error, SessionExpired | WrongAnswer):  # that one has only forgotten us; a liar is known
            failed.update((lost.hop.peer_id, begun) for lost in gone)
        if isinstance(error, Unreachable):
            for lost in gone:
                connection.ban(lost.hop.peer_id)
        refusal: LilliputError | None = None
        while True:
            refused: set[str] = set()
            try:
                banned = {peer for peer, at in failed.items() if time.monotonic() - at < _FORGIVE_SECONDS}
                hops = await chain.hops(gone[0].start, gone[-1].end, banned)
                legs = await chain.open_legs(hops, chain.prefix(length), refused, patience)
                replayed = await chain.replay.feed(legs, length, failed=refused)
                break
            except LilliputError as e:
                failed.update(dict.fromkeys(refused, time.monotonic()))
                if not isinstance(e, MissingBlocks):
                    refusal = e
                if chain.closed or not e.retry_elsewhere or time.monotonic() - begun >= patience.recovery:
                    if lives:
                        raise error from None
                    raise why_nobody(e, refusal, error) from error
                if isinstance(e, MissingBlocks):
                    await asyncio.sleep(_LOOK_AGAIN_SECONDS)
        seconds = time.monotonic() - begun
        await chain.take_over(
            gone, legs, str(error), seconds=seconds, replayed=replayed, waited=replayed, guilty=guilty
        )

    def _gone_with(self, leg: Leg) -> list[Leg]:
        """The leg and those next to it that failed too, as far as no part is between them."""

        def failed_too(other: Leg) -> bool:
            return other.session.broken is not None and other.idle and other.answered == leg.answered

        legs = self._chain.legs
        at = legs.index(leg)
        before = list(itertools.takewhile(failed_too, reversed(legs[:at])))
        return [*reversed(before), leg, *itertools.takewhile(failed_too, legs[at + 1 :])]
