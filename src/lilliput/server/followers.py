"""The servers that could follow this one in a chain, and how far they are: clients weigh their routes by it."""

from __future__ import annotations

import asyncio
import logging

from lilliput.swarm import directory
from lilliput.swarm.node import Node
from lilliput.swarm.records import MOST_FOLLOWERS
from lilliput.swarm.round_trips import RoundTrips

logger = logging.getLogger(__name__)

#: in a swarm of so many servers one looks half as often as in a tiny one, in a larger one more rarely still
_SERVERS_A_LOOK = 100
#: a look waits so long for the first pings (seconds)
_PING_SECONDS = 1.0


class Followers:
    """Of a server whose span ends at block `end`: the nearest servers that hold this block.

    Attributes:
        nearest: their peer ids, and milliseconds to them and back; the nearest first
    """

    def __init__(self, node: Node, model: str, end: int) -> None:
        self.nearest: tuple[tuple[str, float], ...] = ()
        self._node, self._model, self._end = node, model, end
        self._round_trips = RoundTrips(node)

    async def watch(self, interval: float) -> None:
        """See who is new and measure again, every `interval` seconds or, in a large swarm, more rarely."""
        try:
            while True:
                servers = 0
                try:
                    servers = await self._look()
                except Exception as e:  # the network may come back
                    logger.info("could not look for the servers that follow this one: %s", e)
                await asyncio.sleep(interval * (1 + servers / _SERVERS_A_LOOK))
        finally:
            self._round_trips.close()

    async def _look(self) -> int:
        records = await directory.find(self._node, self._model)
        following = [r.peer_id for r in records if r.start <= self._end < r.end and r.state != "draining"]
        await self._round_trips.renew(following, within=_PING_SECONDS)
        self.nearest = tuple(self._round_trips.fastest(following, MOST_FOLLOWERS).items())
        return len(records)
