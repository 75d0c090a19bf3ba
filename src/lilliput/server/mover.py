"""Where a server goes that nobody told which blocks to hold."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from lilliput.errors import Unreachable
from lilliput.swarm import directory
from lilliput.swarm.node import Node
from lilliput.swarm.placement import (
    LOOKS_TO_STAY,
    SECOND_LOOK_SECONDS,
    Coverage,
    Span,
    best_span,
    better_claim,
    better_span,
    jittered,
    usual_block_rate,
)
from lilliput.swarm.records import ServerRecord

logger = logging.getLogger(__name__)
T = TypeVar("T")

#: so often a server that joins looks whether others had the same thought
_SECOND_LOOKS = 3
#: so often it asks who is there, before it gives up
_FIRST_LOOKS = 3


class Mover:
    """Chooses a server's blocks, and moves it where it is needed more.

    :param record: what the server says of itself while it holds nothing; its span is the first `length` blocks
    :param alone: there is no swarm yet, so nobody else is to be waited for
    :param look_seconds: about so often it looks whether to move; 0: never
    :param lease_seconds: how long an announcement counts
    :ivar urgent: some block was served by nobody when it looked last; sessions that need it wait
    :ivar block_rate: the server's tokens a second through one block; None if it has not been measured
    """

    def __init__(
        self,
        node: Node,
        record: ServerRecord,
        *,
        block_rate: float | None,
        alone: bool,
        look_seconds: float,
        lease_seconds: float,
    ) -> None:
        self._node, self._record, self._alone = node, record, alone
        self._length = record.end - record.start
        self._look_seconds, self._lease_seconds = look_seconds, lease_seconds
        self._stays_until = 0.0
        self._failures = 0
        self._held: Span | None = None
        self.block_rate, self.urgent = block_rate, False

    async def choose(self) -> Span:
        """The span in which the server helps most. It says so, and looks again whether others had the same thought."""
        for patience in range(_FIRST_LOOKS, 0, -1):
            try:
                coverage, rate = await self._others()
                break
            except Unreachable:  # where many start at once, answers may be late
                if patience == 1:
                    raise
        span = best_span(coverage, self._length, rate)
        for _ in range(0 if self._alone else _SECOND_LOOKS):
            try:
                await directory.announce(self._node, self._joining(span), self._lease_seconds)
                await asyncio.sleep(jittered(SECOND_LOOK_SECONDS, random.random()))
                coverage, rate = await self._others()
            except Unreachable as e:
                logger.info("could not see who else joins: %s", e)
                break
            elsewhere = better_claim(coverage, span, rate)
            if elsewhere is None:
                break
            span = elsewhere
        self._alone = False
        return span

    async def read(self, span: Span, read: Callable[[Span], Awaitable[T]]) -> T:
        """What `read(span)` returns; meanwhile the swarm is told that the server joins with it.

        Where a move fails so, the server goes back to the span that it held before, and stays there for twice as long
        as after the last move that did.
        """
        try:
            async with self._claiming(span):
                result = await read(span)
            self._held = span
            return result
        except Exception as e:
            back = self._held
            if back is None or back == span:
                raise
            logger.error("cannot move to blocks %d:%d, so back to %d:%d: %s", *span, *back, e)
        self._failures += 1
        stay = LOOKS_TO_STAY * self._look_seconds * 2**self._failures
        self._stays_until = time.monotonic() + jittered(stay, random.random())
        return await self.read(back, read)

    async def watch(self, span: Span, tell: Callable[[Span | None], Awaitable[None]]) -> Span:
        """Return when the server should leave `span`, and for which.

        :param tell: announces that the server wants to move there; None: that it stays after all
        """
        while True:
            await asyncio.sleep(jittered(self._look_seconds, random.random()))
            if time.monotonic() < self._stays_until:
                continue
            try:
                elsewhere = await self._better(span)
                if elsewhere is None:
                    continue
                # others may have had the same thought: say so, wait a moment, look again
                await tell(elsewhere)
                await asyncio.sleep(jittered(SECOND_LOOK_SECONDS, random.random()))
                elsewhere = await self._better(span)
                await tell(elsewhere)
            except Exception as e:  # the network may come back
                logger.info("could not see whether to move: %s", e)
                continue
            if elsewhere is not None:
                stay = LOOKS_TO_STAY * self._look_seconds
                self._stays_until = time.monotonic() + jittered(stay, random.random())
                return elsewhere

    async def withdraw(self) -> None:
        """Say goodbye."""
        await directory.withdraw(self._node, self._record)

    async def _better(self, span: Span) -> Span | None:
        coverage, rate = await self._others()
        self.urgent = bool((coverage.serving == 0).any())
        return better_span(coverage, span, rate)

    async def _others(self) -> tuple[Coverage, float]:
        """What the others hold, and this server's tokens a second through one block."""
        mine = self._record
        records = [
            record
            for record in await directory.find(self._node, mine.model)
            if record.peer_id != mine.peer_id
            and record.end <= mine.model_blocks
            and record.fingerprint in ("", mine.fingerprint)
        ]
        return Coverage.of(records, mine.model_blocks), self.block_rate or usual_block_rate(records)

    @contextlib.asynccontextmanager
    async def _claiming(self, span: Span) -> AsyncIterator[None]:
        """In the block, which reads the span, the swarm is told that the server joins with it."""

        async def go_on() -> None:
            while True:
                try:
                    await directory.announce(self._node, self._joining(span), self._lease_seconds)
                except Exception as e:  # the network may come back
                    logger.warning("could not announce this server to the swarm: %s", e)
                await asyncio.sleep(self._lease_seconds / 3)

        announcing = asyncio.ensure_future(go_on())
        try:
            yield
        finally:
            announcing.cancel()
            await asyncio.wait({announcing})  # a late one would undo what is announced next

    def _joining(self, span: Span) -> ServerRecord:
        start, end = span
        rate = self.block_rate and self.block_rate / (end - start)
        return self._record.model_copy(update={"start": start, "end": end, "state": "joining", "throughput": rate})
