"""Which servers a client walks through: a pure function of their records and of measured round trips."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lilliput.client.costs import (
    SESSION,
    RoundTripTimes,
    Use,
    between,
    block_seconds,
    client_round_trips,
    entry_seconds,
)
from lilliput.errors import MissingBlocks
from lilliput.swarm.records import MOST_FOLLOWERS, ServerRecord

#: where servers push to each other, only so many of the cheapest ways to each block are followed up
_MOST_SOURCES = 64
_CLIENT = -1

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]


@dataclass(frozen=True)
class Guard:
    """Only these peers compute the ends of a model with so many blocks, where text can be read: the first block and the
    last one in any case, and beyond them, from either end, whatever these peers hold."""

    peers: Collection[str]
    blocks: int

    def within(self, records: Sequence[ServerRecord]) -> set[int]:
        """The blocks that they alone compute, of what these servers hold."""
        held = {block for r in records if r.peer_id in self.peers for block in range(r.start, r.end)}
        missing = [block for block in range(self.blocks) if block not in held] or [self.blocks]
        return {0, self.blocks - 1, *range(missing[0]), *range(missing[-1] + 1, self.blocks)}


@dataclass(frozen=True)
class Hop:
    """One leg of a chain: the server of `record` computes blocks `[start, end)`."""

    record: ServerRecord
    start: int
    end: int

    @property
    def peer_id(self) -> str:
        return self.record.peer_id

    def __str__(self) -> str:
        return f"{self.peer_id[-8:]} ({self.start}:{self.end})"


@dataclass(frozen=True)
class Leg:
    """What a hop is expected to take of each step, in seconds.

    :ivar network: to the server and back; where servers push, the way to it from the server before it (or the client)
    :ivar compute: of its blocks
    """

    hop: Hop
    network: float
    compute: float


@dataclass(frozen=True)
class Estimate:
    """What a chain is expected to take of each step, in seconds.

    :ivar back: the way from the last server to the client, where servers push
    """

    legs: list[Leg]
    back: float = 0.0

    @property
    def total(self) -> float:
        return sum(leg.network + leg.compute for leg in self.legs) + self.back


def usable(record: ServerRecord, banned: Collection[str] = frozenset()) -> bool:
    """Whether new work may be sent to this server."""
    return record.state == "serving" and record.peer_id not in banned


def find_chain(
    records: Sequence[ServerRecord],
    start: int,
    end: int,
    *,
    banned: Collection[str] = frozenset(),
    round_trips: RoundTripTimes | None = None,
    use: Use = SESSION,
    pushes: bool = False,
    guard: Guard | None = None,
) -> list[Hop]:
    """The cheapest chain of servers for blocks `[start, end)`; the one with fewest hops among equals.

    Spans may overlap: 0:12 and 8:30 make a chain 0:12, 12:30 or 0:8, 8:30. Servers that are not serving, and peers in
    `banned`, are passed over.

    :param round_trips: from this client to the servers, as far as they were measured
    :param use: what counts how much
    :param pushes: servers send what they computed straight to the next one; without, everything returns to the client
    :param guard: only some peers compute the ends of the model

    Raises `MissingBlocks` naming the spans that nobody holds.
    """
    if not start < end:
        raise ValueError(f"an empty run of blocks: {start}:{end}")
    records = [r for r in records if usable(r, banned)]
    candidates = [r for r in records if r.start < end and r.end > start]
    _check_covered(candidates, start, end, guard)
    guarded = guard.within(records) if guard else set()
    starts, ends = np.array([(r.start, r.end) for r in candidates]).T
    once = np.array([entry_seconds(r) for r in candidates])
    per_block = np.array([block_seconds(r, use) for r in candidates])
    legs = (_Pushed if pushes else _ThroughClient)(candidates, round_trips or {}, use)

    # inside[i]: the cheapest way to have computed all blocks so far, the last one on server i; came[b, i]: who had
    # computed the block before, the server itself if it was there already
    inside = np.full(len(candidates), np.inf)
    came = np.full((end - start, len(candidates)), _CLIENT)
    for block in range(start, end):
        (here,) = np.nonzero((starts <= block) & (ends > block))
        if guard and block in guarded:
            here = np.array([i for i in here if candidates[i].peer_id in guard.peers])
        before, origin = legs.into(inside, here) if block > start else (legs.first[here], np.full(len(here), _CLIENT))
        entering, staying = before + once[here], inside[here]
        enters = entering < staying
        came[block - start, here] = np.where(enters, origin, here)
        inside = np.full(len(candidates), np.inf)
        inside[here] = np.where(enters, entering, staying) + per_block[here]

    chain: list[Hop] = []
    at, until = int((inside + legs.back).argmin()), end
    for block in range(end - 1, start - 1, -1):
        if (previous := int(came[block - start, at])) != at:
            chain.append(Hop(candidates[at], block, until))
            at, until = previous, block
    return chain[::-1]


def estimate(
    chain: Sequence[Hop],
    *,
    round_trips: RoundTripTimes | None = None,
    use: Use = SESSION,
    pushes: bool = False,
) -> Estimate:
    """What each hop of a chain is expected to take. Parameters as of `find_chain`."""
    away = client_round_trips([hop.record for hop in chain], round_trips or {})
    legs = []
    for number, hop in enumerate(chain):
        network = away[number]
        if pushes:
            if number:
                network = between(chain[number - 1].record, hop.record, away[number - 1], network)
            network /= 2
        compute = block_seconds(hop.record, use) * (hop.end - hop.start)
        legs.append(Leg(hop, use.network * network, compute))
    return Estimate(legs, use.network * away[-1] / 2 if pushes else 0.0)


class _ThroughClient:
    """Everything returns to the client: a server is as far as it is from there, wherever one comes from."""

    def __init__(self, records: Sequence[ServerRecord], round_trips: RoundTripTimes, use: Use) -> None:
        self.first: Floats = use.network * np.array(client_round_trips(records, round_trips))
        self.back: Floats = np.zeros(len(records))

    def into(self, inside: Floats, here: Indices) -> tuple[Floats, Indices]:
        """What it costs to have come to each server of `here`, and from which server."""
        best = inside.argmin()
        return inside[best] + self.first[here], np.full(len(here), best)


class _Pushed:
    """Servers send what they computed straight to the next one, and the last one to the client."""

    def __init__(self, records: Sequence[ServerRecord], round_trips: RoundTripTimes, use: Use) -> None:
        self.first: Floats = use.network / 2 * np.array(client_round_trips(records, round_trips))
        self.back = self.first
        # one row a server: the servers that could follow it, and how far they are
        numbers = {record.peer_id: number for number, record in enumerate(records)}
        counts = np.array([len(record.followers) for record in records])
        flat = [follower for record in records for follower in record.followers]
        places = np.repeat(np.arange(len(records)), counts), np.concatenate([np.arange(count) for count in counts])
        self._following = np.full((len(records), MOST_FOLLOWERS), -1)
        self._away = np.zeros((len(records), MOST_FOLLOWERS))
        self._following[places] = [numbers.get(peer, -1) for peer, _ in flat]
        self._away[places] = [milliseconds for _, milliseconds in flat]
        self._away *= use.network / 2000

    def into(self, inside: Floats, here: Indices) -> tuple[Floats, Indices]:
        """What it costs to have come to each server of `here`, and from which server."""
        (sources,) = np.nonzero(np.isfinite(inside))
        if len(sources) > _MOST_SOURCES:
            sources = sources[inside[sources].argpartition(_MOST_SOURCES)[:_MOST_SOURCES]]
        ways = np.maximum(self.first[sources, None], self.first[here])  # see `costs.between`
        column = np.full(len(inside) + 1, -1)
        column[here] = np.arange(len(here))
        columns = column[self._following[sources]]
        rows, places = np.nonzero(columns >= 0)
        ways[rows, columns[rows, places]] = self._away[sources[rows], places]
        ways += inside[sources, None]
        best = ways.argmin(axis=0)
        return ways[best, np.arange(len(here))], sources[best]


def missing_blocks(records: Sequence[ServerRecord], start: int, end: int) -> list[tuple[int, int]]:
    """The runs of blocks in `[start, end)` that none of these servers holds."""
    missing: list[tuple[int, int]] = []
    at = start
    for span_start, span_end in sorted((r.start, r.end) for r in records if r.start < end and r.end > start):
        if span_start > at:
            missing.append((at, span_start))
        at = max(at, span_end)
    if at < end:
        missing.append((at, end))
    return missing


def _check_covered(records: Sequence[ServerRecord], start: int, end: int, guard: Guard | None) -> None:
    if missing := missing_blocks(records, start, end):
        spans = ", ".join(f"{a}:{b}" for a, b in missing)
        raise MissingBlocks(f"no server holds blocks {spans}", tuple(missing))
    if guard is None:
        return
    for block in (0, guard.blocks - 1):
        if start <= block < end and not any(r.start <= block < r.end and r.peer_id in guard.peers for r in records):
            names = ", ".join(sorted(peer[-8:] for peer in guard.peers))
            text = f"no trusted peer ({names}) serves block {block}, and no other may: blocks {block}:{block + 1}"
            raise MissingBlocks(text, ((block, block + 1),))
