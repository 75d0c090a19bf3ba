"""The servers that could follow this one in a chain, and how far they are: clients weigh their routes by it."""

from __future__ import annotations

from lilliput.swarm import directory
from lilliput.swarm.node import Node
from lilliput.swarm.records import MOST_FOLLOWERS
from lilliput.swarm.round_trips import RoundTrips

#: a look at a swarm of so many servers is worth one announcement; at a larger one, accordingly more
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
        self._skip = 0

    async def look(self) -> None:
        """Measure again, and see who is new. To be called before every announcement."""
        if self._skip > 0:
            self._skip -= 1
            return
        records = await directory.find(self._node, self._model)
        self._skip = len(records) // _SERVERS_A_LOOK
        following = [r.peer_id for r in records if r.start <= self._end < r.end and r.state != "draining"]
        await self._round_trips.renew(following, within=_PING_SECONDS)
        self.nearest = tuple(self._round_trips.fastest(following, MOST_FOLLOWERS).items())

    def close(self) -> None:
        self._round_trips.close()
