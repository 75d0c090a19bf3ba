"""Which servers a client walks through: a pure function of their records."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from lilliput.errors import MissingBlocks
from lilliput.swarm.records import ServerRecord

#: assumed for a server that has not measured itself yet
_UNKNOWN_BLOCK_SECONDS = 0.005
#: each session that runs there already slows ours by this share
_SHARING = 0.1
#: of each session that waits in front of us
_QUEUE_SECONDS = 1.0
#: of a server with no free cache at all; grows evenly towards it
_FULL_SECONDS = 0.05
#: one hop more is never worth it: the network between two peers has not been measured
_HOP_SECONDS = 1e4


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


def usable(record: ServerRecord, banned: Collection[str] = frozenset()) -> bool:
    """Whether new work may be sent to this server."""
    return record.state == "serving" and record.peer_id not in banned


def costs(record: ServerRecord) -> tuple[float, float]:
    """What a step of one token through a server costs: seconds once, and seconds for each block."""
    blocks = record.end - record.start
    if record.step_ms is not None:
        per_block = record.step_ms / 1000 / blocks
    elif record.tokens_per_second:
        per_block = 1 / record.tokens_per_second / blocks
    else:
        per_block = _UNKNOWN_BLOCK_SECONDS
    per_block *= 1 + _SHARING * record.sessions
    used = 1 - min(record.cache_tokens_free / record.cache_tokens, 1.0) if record.cache_tokens else 0.0
    return _HOP_SECONDS + _QUEUE_SECONDS * record.queue_length + _FULL_SECONDS * used, per_block


def find_chain(
    records: Sequence[ServerRecord], start: int, end: int, *, banned: Collection[str] = frozenset()
) -> list[Hop]:
    """The cheapest chain of servers for blocks `[start, end)`: fewest hops, then lowest `costs`.

    Spans may overlap: 0:12 and 8:30 make a chain 0:12, 12:30 or 0:8, 8:30. Servers that are not serving, and peers in
    `banned`, are passed over. Raises `MissingBlocks` naming the spans that nobody holds.
    """
    if not start < end:
        raise ValueError(f"an empty run of blocks: {start}:{end}")
    candidates = [r for r in records if usable(r, banned) and r.start < end and r.end > start]
    _check_covered(candidates, start, end)
    starts = np.array([r.start for r in candidates])
    ends = np.minimum([r.end for r in candidates], end)
    once, per_block = np.array([costs(r) for r in candidates]).T

    # best[b]: the cheapest way to have computed blocks [start, b); via[b]: its last leg (where from, by whom)
    best = np.full(end + 1, np.inf)
    best[start] = 0.0
    via_block, via_record = np.zeros(end + 1, int), np.zeros(end + 1, int)
    for block in range(start, end):
        if not np.isfinite(best[block]):
            continue
        (here,) = np.nonzero((starts <= block) & (ends > block))
        stops = np.arange(block + 1, int(ends[here].max()) + 1)
        legs = best[block] + once[here, None] + per_block[here, None] * (stops - block)
        legs[ends[here, None] < stops] = np.inf
        cheapest = legs.argmin(axis=0)
        legs_min = legs[cheapest, np.arange(len(stops))]
        better = legs_min < best[stops]
        best[stops[better]] = legs_min[better]
        via_block[stops[better]] = block
        via_record[stops[better]] = here[cheapest[better]]

    chain: list[Hop] = []
    at = end
    while at > start:
        chain.append(Hop(candidates[via_record[at]], int(via_block[at]), at))
        at = int(via_block[at])
    return chain[::-1]


def _check_covered(records: Sequence[ServerRecord], start: int, end: int) -> None:
    missing: list[tuple[int, int]] = []
    at = start
    for span_start, span_end in sorted((r.start, r.end) for r in records):
        if span_start > at:
            missing.append((at, span_start))
        at = max(at, span_end)
    if at < end:
        missing.append((at, end))
    if missing:
        spans = ", ".join(f"{a}:{b}" for a, b in missing)
        raise MissingBlocks(f"no server holds blocks {spans}", tuple(missing))
