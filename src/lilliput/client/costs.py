"""What a chain of servers costs: seconds for each step, from what servers announce and what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lilliput.swarm.records import ServerRecord

#: seconds from this client to a peer and back; None if it did not answer the last ping
RoundTripTimes = Mapping[str, float | None]

#: assumed for a server that has not measured itself yet
_UNKNOWN_BLOCK_SECONDS = 0.005
#: each session that runs there already slows ours by this share
_SHARING = 0.1
#: of each session that waits in front of us
_QUEUE_SECONDS = 1.0
#: of a server with no free cache at all; grows evenly towards it
_FULL_SECONDS = 0.05
#: what a hop costs beside network and compute: a message is written and read, a round is begun
HOP_SECONDS = 0.0015
#: assumed where nothing at all was measured
_UNKNOWN_ROUND_TRIP = 0.05
#: assumed for a peer that does not answer pings
_SILENT_ROUND_TRIP = 1.0
#: in a pass over many tokens, a server that has not measured that computes so many tokens in the time of one
_BATCH_GAIN = 16


@dataclass(frozen=True)
class Use:
    """What a chain is used for, and so what counts how much.

    :ivar tokens: of one step
    :ivar network: the share of the way that a step waits for; the rest happens while others are computed
    """

    tokens: int
    network: float


#: token after token: nothing happens while one is under way
SESSION = Use(tokens=1, network=1.0)
#: forward and backward passes: eight parts of a batch follow one another through the chain
PASSES = Use(tokens=1024, network=1 / 8)


def block_seconds(record: ServerRecord, use: Use = SESSION) -> float:
    """What a step takes in each block of a server."""
    blocks = record.end - record.start
    if use.tokens > 1 and record.prefill_tokens_per_second:
        seconds = use.tokens / record.prefill_tokens_per_second / blocks
    else:
        if record.step_ms is not None:
            seconds = record.step_ms / 1000 / blocks
        elif record.tokens_per_second:
            seconds = 1 / record.tokens_per_second / blocks
        else:
            seconds = _UNKNOWN_BLOCK_SECONDS
        if use.tokens > 1:
            seconds *= use.tokens / _BATCH_GAIN
    return seconds * (1 + _SHARING * record.sessions)


def entry_seconds(record: ServerRecord) -> float:
    """What it costs to use a server at all, however many of its blocks: a hop, its queue, how full it is."""
    used = 1 - min(record.cache_tokens_free / record.cache_tokens, 1.0) if record.cache_tokens else 0.0
    return HOP_SECONDS + _QUEUE_SECONDS * record.queue_length + _FULL_SECONDS * used


def client_round_trips(records: Sequence[ServerRecord], measured: RoundTripTimes) -> list[float]:
    """Seconds to each server and back. One that was not measured is taken to be as far as the others are."""
    known = [took for record in records if (took := measured.get(record.peer_id)) is not None]
    usual = statistics.median(known) if known else _UNKNOWN_ROUND_TRIP
    times = []
    for record in records:
        took = measured.get(record.peer_id, usual)
        times.append(_SILENT_ROUND_TRIP if took is None else took)
    return times


def between(record: ServerRecord, following: ServerRecord, round_trip: float, following_round_trip: float) -> float:
    """Seconds from a server to one that follows it and back: as it measured, or else as far as the farther one is
    from the client (it cannot be farther than both ways together, nor nearer than their difference)."""
    for peer, milliseconds in record.followers:
        if peer == following.peer_id:
            return milliseconds / 1000
    return max(round_trip, following_round_trip)
