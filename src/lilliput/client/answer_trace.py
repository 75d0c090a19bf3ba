"""Where the time of an answer went: server by server, for its first token and for those after it.

The client's clock says how long each crossing took, the servers' clocks how long they queued and computed; what is left
is the network. Where servers push, only the sum of all ways of a crossing is measured. It is shared out as the ways are
long: to and from the client by its pings, between servers by how long earlier pushes took to arrive.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np

from lilliput.client.costs import RoundTripTimes
from lilliput.client.decoder import EndsTime
from lilliput.client.step_trace import HopTime, StepTrace

#: medians and maxima are of so many of the last tokens; sums are of all
_MOST_TOKENS = 1024
_PUSHES = 64
#: in the order in which they happen, before and after what happens at servers
_BEFORE, _AFTER = (
    ("embedding", "opening", "moving", "recovering", "lost"),
    ("back", "auditing", "waiting", "head", "rest"),
)
_AT_SERVERS = ("network", "queue", "compute")


class Place(NamedTuple):
    """Where time goes. Names are

    network, queue, compute   of the server `peer_id` with blocks `[start, end)`; its network is the way to it, and back
                              if it neither was pushed to nor pushed anything on
    back                      the way from the last server, where servers push
    embedding, head           the model's ends here; the head with the choice of a token
    opening                   finding servers and opening sessions
    waiting                   for other streams of this process, to go on together
    moving, recovering, lost  while others took over; in what failed
    auditing                  while others checked what came back
    rest                      not accounted for; below 0, so much happened at the same time
    """

    name: str
    peer_id: str = ""
    start: int = 0
    end: int = 0


class _Ways(NamedTuple):
    """The network of crossings that went through several servers, which is only known as a whole."""

    hops: tuple[tuple[str, int, int], ...]

    @property
    def legs(self) -> list[tuple[Place, tuple[str, str]]]:
        """Each way's place, and from whom to whom it leads; the client has no name."""
        peers = ["", *(peer for peer, _, _ in self.hops), ""]
        places = [*(Place("network", *hop) for hop in self.hops), Place("back")]
        return list(zip(places, itertools.pairwise(peers), strict=True))


_Times = dict[Place | _Ways, float]
#: seconds, or those of many tokens
Amount = TypeVar("Amount", float, np.ndarray)


@dataclass(frozen=True)
class Spent:
    """What went to one place, in seconds.

    :ivar first: of the first token
    :ivar median, most: of the tokens after it
    :ivar total: of all
    :ivar estimated: it is a share of what was measured as a whole
    """

    place: Place
    first: float
    median: float
    most: float
    total: float
    estimated: bool


class AnswerTrace:
    """Collects what is told about one answer: give `saw_step` to its session, `saw_ends` to the decoder.

    :param on_step: is told about steps, too
    :ivar began: when it was made (`time.perf_counter`)
    :ivar tokens: that came
    """

    def __init__(self, on_step: Callable[[StepTrace], None] | None = None) -> None:
        self.began = self._last = time.perf_counter()
        self._on_step = on_step
        self._step: StepTrace | None = None
        self._first: _Times = {}
        #: of the tokens after the first, a value for each
        self._later: dict[Place | _Ways, deque[float]] = {}
        self._sums: defaultdict[Place | _Ways, float] = defaultdict(float)
        self._pushes: defaultdict[tuple[str, str], deque[float]] = defaultdict(lambda: deque(maxlen=_PUSHES))
        self.tokens = 0

    @property
    def seconds(self) -> float:
        """Until the last token came."""
        return self._last - self.began

    @property
    def first_seconds(self) -> float:
        """Until the first token came."""
        return sum(self._first.values())

    def saw_step(self, step: StepTrace) -> None:
        self._step = step
        if self._on_step is not None:
            self._on_step(step)

    def saw_ends(self, ends: EndsTime) -> None:
        """A token has come, of the step that was seen last."""
        now = time.perf_counter()
        times = self._times(self._step, ends) if self._step is not None else {}
        times[Place("rest")] = now - self._last - sum(times.values())
        self._last, self._step = now, None
        for place, seconds in times.items():
            self._sums[place] += seconds
        if self.tokens:
            self._note_later(times)
        else:
            self._first = times
        self.tokens += 1

    def _note_later(self, times: _Times) -> None:
        for place in times.keys() - self._later.keys():
            before = min(self.tokens - 1, _MOST_TOKENS)
            self._later[place] = deque([0.0] * before, maxlen=_MOST_TOKENS)
        for place, column in self._later.items():
            column.append(times.get(place, 0.0))

    def _times(self, step: StepTrace, ends: EndsTime) -> _Times:
        times: defaultdict[Place | _Ways, float] = defaultdict(float)
        for name in ("opening", "moving", "recovering", "lost", "auditing"):
            if seconds := getattr(step, name):
                times[Place(name)] = seconds
        for crossing in step.crossings:
            places = [_places(hop.peer_id, hop.start, hop.end) for hop in crossing.hops]
            if len(places) == 1:
                times[places[0][0]] += crossing.network
            elif places:
                times[_Ways(tuple((hop.peer_id, hop.start, hop.end) for hop in crossing.hops))] += crossing.network
            for hop, (_, queue, compute) in zip(crossing.hops, places, strict=True):
                times[queue] += hop.queued
                times[compute] += hop.computing
            self._note_pushes(crossing.hops)
        for name, seconds in (("embedding", ends.embedding), ("waiting", ends.waiting), ("head", ends.computing)):
            times[Place(name)] += seconds
        return dict(times)

    def _note_pushes(self, hops: Sequence[HopTime]) -> None:
        for hop, following in itertools.pairwise(hops):
            if hop.there_and_back:
                self._pushes[hop.peer_id, following.peer_id].append(hop.there_and_back)

    # ---- what comes of it

    def spent(self, round_trips: RoundTripTimes) -> list[Spent]:
        """Where the time went, in the order in which it passes. First and total add up to those of the answer.

        :param round_trips: seconds from here to each server and back, as far as they are known
        """
        ways = {way: statistics.median(took) / 2 for way, took in self._pushes.items()}
        for peer, took in round_trips.items():
            if took is not None:
                ways["", peer] = ways[peer, ""] = took / 2
        first, sums = shared_out(self._first, ways), shared_out(self._sums, ways)
        later = shared_out({place: np.array(column) for place, column in self._later.items()}, ways)
        estimated = {place for key in self._sums if isinstance(key, _Ways) for place, _ in key.legs}
        return [
            Spent(
                place,
                first.get(place, 0.0),
                float(np.median(later[place])) if place in later else 0.0,
                float(np.max(later[place])) if place in later else 0.0,
                sums[place],
                place in estimated,
            )
            for place in _in_order(sums)
        ]


def shared_out(times: Mapping[Place | _Ways, Amount], ways: Mapping[tuple[str, str], float]) -> dict[Place, Amount]:
    """The same times, with the network of each leg. Ways that nobody has measured are taken to be as long as others.

    :param ways: from one peer to another, as far as they are known; shares are in proportion to them
    """
    found: dict[Place, Amount] = {}
    for key, amount in times.items():
        if isinstance(key, Place):
            found[key] = found[key] + amount if key in found else amount
            continue
        lengths = [ways.get(way) for _, way in key.legs]
        known = [length for length in lengths if length]
        usual = statistics.mean(known) if known else 1.0
        shares = [length or usual for length in lengths]
        for (place, _), share in zip(key.legs, shares, strict=True):
            part = amount * (share / sum(shares))
            found[place] = found[place] + part if place in found else part
    return found


@functools.lru_cache(maxsize=1024)
def _places(peer_id: str, start: int, end: int) -> tuple[Place, Place, Place]:
    """A server's network, queue and compute; made once, since steps are many."""
    network, queue, compute = (Place(name, peer_id, start, end) for name in _AT_SERVERS)
    return network, queue, compute


def _in_order(places: Mapping[Place, float]) -> list[Place]:
    servers = sorted({place[1:] for place in places if place.name in _AT_SERVERS}, key=lambda at: (at[1:], at[0]))
    order = [
        *(Place(name) for name in _BEFORE),
        *(Place(name, *server) for server in servers for name in _AT_SERVERS),
        *(Place(name) for name in _AFTER),
    ]
    return [place for place in order if place in places]


def facts(spent: Sequence[Spent]) -> list[dict[str, Any]]:
    """For programs, in milliseconds."""
    return [
        {
            "part": one.place.name,
            **({"peer_id": one.place.peer_id, "blocks": [one.place.start, one.place.end]} if one.place.peer_id else {}),
            "first_ms": _ms(one.first),
            "median_ms": _ms(one.median),
            "max_ms": _ms(one.most),
            "total_ms": _ms(one.total),
            **({"estimated": True} if one.estimated else {}),
        }
        for one in spent
    ]


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
