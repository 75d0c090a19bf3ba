"""How servers that take others' places come to hold the same caches.

They are sent what is on the chain's tape. What entered the blocks in the middle of the chain may be on no tape: then
the servers before, which live, compute it once more, from the first one on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from lilliput.client.history import TokenHistory
from lilliput.client.leg import Leg, close_legs
from lilliput.client.run import compute
from lilliput.client.tape import Mark
from lilliput.client.tasks import all_of

if TYPE_CHECKING:
    from lilliput.client.chain import Chain

#: where a leg stands that no part may be sent to
_TAKES_NONE = -1


class Replay:
    """Plays a chain's tape to new legs. Belongs to the chain."""

    def __init__(self, chain: Chain) -> None:
        self._chain = chain

    async def feed(
        self,
        legs: list[Leg],
        length: int,
        mark: Mark | None = None,
        *,
        failed: set[str] | None = None,
        names: TokenHistory | None = None,
    ) -> int:
        """Bring new legs to `length`; returns the tokens per row that they computed. If they fail, they are closed.

        :param mark: of the tape now, if steps go on meanwhile: stop at a token that is not on it any more
        :param failed: gets the peers that failed
        :param names: by which the servers may find what they are fed; default: the chain's tokens
        """
        try:
            block, at = legs[0].start, min(leg.answered for leg in legs)
            if not self._chain.tape.knows(block, at, length):
                await self._make_again(block, at)
            await self._play(legs, at, length, mark, names=names)
            return min(leg.answered for leg in legs) - at
        except BaseException:
            if failed is not None:
                failed.update(leg.hop.peer_id for leg in legs if leg.session.broken or not leg.idle)
            await close_legs(legs)
            raise

    async def _play(
        self,
        legs: list[Leg],
        begin: int,
        end: int,
        mark: Mark | None = None,
        *,
        keep_outputs: bool = False,
        names: TokenHistory | None = None,
    ) -> None:
        """Send what is on the tape through legs that follow one another."""
        tape, history = self._chain.tape, names or self._chain.history
        stopped = False

        async def through(begin: int, end: int, rows: int) -> None:
            nonlocal stopped
            while legs[0].sent != begin and not stopped:
                await legs[0].changed()
            if stopped or not (mark is None or (tape.kept(mark) >= end and tape.knows(legs[0].start, begin, end))):
                stopped = True
                legs[0].wake()
                return
            part = tape.play(legs[0].start, begin, end, rows=rows)
            part.hashes = history.keys(begin, end, rows) if mark is None else b""
            for leg in legs:
                while leg.sent != begin:
                    await leg.changed()
                if leg is not legs[0] and names is None and (mark is None or tape.kept(mark) >= end):
                    tape.write(leg.start, part)
                part = replace(part, hidden=await compute(leg, part))
            if keep_outputs:
                tape.write(legs[-1].end, part, needed=True)

        for leg in legs:
            leg.stand_at(begin)
        await all_of([asyncio.create_task(through(*part)) for part in self._parts(legs, begin, end)])

    def _parts(self, legs: list[Leg], begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """First token, last token, and rows: tokens that all rows share are sent for one of them."""
        if begin >= end:
            return
        tape = self._chain.tape
        shared = min(tape.shared, end) if tape.rows > 1 else 0
        hidden = tape.play(self._chain.start, begin, begin + 1).hidden
        while begin < end:
            sent, until = (1, shared) if begin < shared else (tape.rows, end)
            stop = min(begin + self._chain.part_tokens(sent, hidden, legs), until)
            yield begin, stop, sent
            begin = stop

    async def _make_again(self, block: int, begin: int) -> None:
        """Put on the tape what entered `block`, from token `begin` on: the server before it computes it once more."""
        chain = self._chain
        while True:
            before = next(leg for leg in chain.legs if leg.end == block)
            if not before.idle:
                await before.changed()
            elif before.session.broken is not None:
                await chain.repair.repair([before], before.session.broken)
            else:
                break
        stands = before.answered
        before.stand_at(_TAKES_NONE)
        try:
            if not chain.tape.knows(before.start, begin, stands):
                await self._make_again(before.start, begin)
            await self._play([before], begin, stands, keep_outputs=True)
        except BaseException:
            before.stand_at(stands)
            await before.session.close()  # nobody knows what is in its cache now
            raise
