"""Where the time of a step went, hop by hop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class HopTime:
    """What one server spent on a part of a step, in seconds, by its own clock.

    :ivar queued: it was there and was not computed
    :ivar there_and_back: to the next server, as a push before this one took it; 0: not known
    """

    peer_id: str
    start: int
    end: int
    queued: float
    computing: float
    there_and_back: float = 0.0


@dataclass(frozen=True)
class Crossing:
    """A part of a step left, went through one server or several that pushed it on, and came back; or it failed.

    :ivar seconds: between the two, by the client's clock
    :ivar hops: empty if it failed
    """

    seconds: float
    hops: tuple[HopTime, ...]

    @property
    def network(self) -> float:
        """What no server accounts for: the ways between all of them, and messages that are written and read."""
        if not self.hops:
            return 0.0
        return max(self.seconds - sum(hop.queued + hop.computing for hop in self.hops), 0.0)


@dataclass(frozen=True)
class StepTrace:
    """One step of a session. All times in seconds.

    :ivar tokens: per row
    :ivar seconds: from when it was asked for until its outputs were here
    :ivar opening: of these, finding servers and opening sessions there
    :ivar moving: waiting while the session moved to other servers
    :ivar recovering: waiting for others to take over from servers that failed
    :ivar auditing: waiting for others to check what servers returned
    :ivar crossings: of its parts. Those of a long step are under way at the same time.
    """

    tokens: int
    seconds: float
    opening: float
    moving: float
    recovering: float
    auditing: float
    crossings: Sequence[Crossing]

    @property
    def hops(self) -> list[HopTime]:
        return [hop for crossing in self.crossings for hop in crossing.hops]

    @property
    def queued(self) -> float:
        return sum(hop.queued for hop in self.hops)

    @property
    def computing(self) -> float:
        return sum(hop.computing for hop in self.hops)

    @property
    def network(self) -> float:
        return sum(crossing.network for crossing in self.crossings)

    @property
    def lost(self) -> float:
        """In crossings that failed."""
        return sum(crossing.seconds for crossing in self.crossings if not crossing.hops)

    @property
    def rest(self) -> float:
        """What nothing above accounts for. Below 0: so much of it happened at the same time."""
        known = self.opening + self.moving + self.recovering + self.auditing + self.lost
        return self.seconds - known - self.network - self.queued - self.computing
