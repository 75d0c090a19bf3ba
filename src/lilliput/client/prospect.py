"""Whether a running session should go over to other servers: pure functions of chains and what they are expected to
take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lilliput.client.costs import HOP_SECONDS, RoundTripTimes, Use, block_seconds
from lilliput.client.route import Hop, estimate

#: a chain that is not this much faster is not better: estimates are not exact, and others move as well
_FASTER = 0.8
#: what a move saves has to be so many times what it costs the servers
_GAIN = 2.0


@dataclass(frozen=True)
class Change:
    """Hops `[first, last)` of a chain replaced by others that hold the same blocks."""

    first: int
    last: int
    hops: list[Hop]


@dataclass(frozen=True)
class Prospect:
    """What another chain would bring, in seconds.

    :ivar now: of a token through the present chain, as expected
    :ivar then: through the other one
    :ivar replay: that servers spend on computing the session's tokens once more
    """

    now: float
    then: float
    replay: float

    def pays(self, tokens: int) -> bool:
        """Whether it is worth its cost if so many tokens are still to come."""
        return self.then <= _FASTER * self.now and (self.now - self.then) * tokens >= _GAIN * self.replay


def change(present: Sequence[Hop], other: Sequence[Hop]) -> Change | None:
    """What has to be replaced to come from one chain to another for the same blocks; None if it is the same."""
    mine, theirs = ([(hop.peer_id, hop.start, hop.end) for hop in hops] for hops in (present, other))
    if mine == theirs:
        return None
    first = 0
    while mine[first] == theirs[first]:
        first += 1
    same = 0
    while mine[-1 - same] == theirs[-1 - same]:
        same += 1
    return Change(first, len(mine) - same, list(other[first : len(theirs) - same]))


def prospect(
    present: Sequence[Hop], other: Sequence[Hop], history: int, *, round_trips: RoundTripTimes, pushes: bool
) -> Prospect | None:
    """What it would bring to go over from one chain to another; None if that is the same one.

    :param present: with what its servers announce now; this session is one of those that they count
    :param history: tokens that the new servers have to compute. Where servers push, those before them do it, too.
    :param round_trips, pushes: as of `route.find_chain`
    """
    if (changed := change(present, other)) is None:
        return None
    without_us = [
        Hop(hop.record.model_copy(update={"sessions": max(hop.record.sessions - 1, 0)}), hop.start, hop.end)
        for hop in present
    ]
    # of the servers of both chains, this session runs on those already
    by_peer = {hop.peer_id: hop.record for hop in without_us}
    other = [Hop(by_peer.get(hop.peer_id, hop.record), hop.start, hop.end) for hop in other]
    computing = [*(without_us[: changed.first] if pushes else []), *changed.hops]
    prefill = Use(tokens=max(history, 2), network=0.0)
    return Prospect(
        _seconds_a_token(without_us, round_trips, pushes),
        _seconds_a_token(other, round_trips, pushes),
        sum(block_seconds(hop.record, prefill) * (hop.end - hop.start) for hop in computing),
    )


def _seconds_a_token(hops: Sequence[Hop], round_trips: RoundTripTimes, pushes: bool) -> float:
    return estimate(hops, round_trips=round_trips, pushes=pushes).total + HOP_SECONDS * len(hops)
