"""Where the time of a step went, hop by hop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lilliput.client.leg import Leg
    from lilliput.client.server_session import ServerSession

#: seconds queued and computing that each session's server has reported
Reported = Mapping["ServerSession", tuple[float, float]]


@dataclass(frozen=True)
class HopTime:
    """What one server spent on a step, in seconds, by its own clock."""

    peer_id: str
    start: int
    end: int
    queued: float
    computing: float


@dataclass(frozen=True)
class StepTrace:
    """One step of a session.

    :ivar tokens: per row
    :ivar seconds: from when it was sent until its outputs were here
    :ivar hops: the chain as it was when the step ended. A server that took over meanwhile also counts its replay.
    """

    tokens: int
    seconds: float
    hops: tuple[HopTime, ...]

    @property
    def queued(self) -> float:
        return sum(hop.queued for hop in self.hops)

    @property
    def computing(self) -> float:
        return sum(hop.computing for hop in self.hops)

    @property
    def network(self) -> float:
        """What no server accounts for: the ways between all of them, and messages that are written and read.

        Parts of a long step are computed by several servers at the same time; then little or nothing is left of it.
        """
        return max(self.seconds - self.queued - self.computing, 0.0)


def reported(legs: Sequence[Leg]) -> Reported:
    """What the servers of a chain have reported so far."""
    return {leg.session: (leg.session.stats.queued_ms / 1e3, leg.session.stats.compute_ms / 1e3) for leg in legs}


def trace(tokens: int, seconds: float, legs: Sequence[Leg], before: Reported) -> StepTrace:
    """A step that has just ended, from what had been reported before it."""
    hops = []
    for session, (queued, computing) in reported(legs).items():
        queued_before, computing_before = before.get(session, (0.0, 0.0))
        hop = session.hop
        hops.append(HopTime(hop.peer_id, hop.start, hop.end, queued - queued_before, computing - computing_before))
    return StepTrace(tokens, seconds, tuple(hops))
