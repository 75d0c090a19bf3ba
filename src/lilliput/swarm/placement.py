"""Which blocks a server should hold: pure functions of what servers announce.

Every block has a *need*, which falls with each server that holds it and with their rates. A server's *gain* from a span
is how much need it takes away there. Joining servers take the span with the largest gain. Servers that serve compare
what they take away where they are with what they would take away elsewhere; since every move lowers the sum of all
needs by a clear share, moves come to an end, however many servers decide for themselves.

Others are counted where they are going to be: a server that joins, where it loads; one that moves, where it moves to.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lilliput.swarm.records import ServerRecord

Span = tuple[int, int]
Floats = npt.NDArray[np.float64]

#: a server moves if it gains so many times as much elsewhere. With the exponent below: to blocks that are about a
#: tenth weaker than those it leaves, itself not counted in either
CLEAR_GAIN = 1.3
#: a server that has moved stays for so many of its looks around
LOOKS_TO_STAY = 5
#: who has said where it is going waits about so long, and looks whether others have had the same thought (seconds)
SECOND_LOOK_SECONDS = 2.0
#: what a block with no server at all needs, in terms of what a block at the swarm's average needs
_HOLE = 1e4
#: each further server divides by this the need for more *servers*; from the third one on, rates count for more
_FURTHER = 100.0
#: the need for more *rate* grows with this power of how far a block is below the average
_STEEPNESS = 2.0
#: of the average: rates below this are as good as none
_LEAST_RATE = 0.05
#: assumed for servers that have not measured themselves, if nobody has
_UNKNOWN_RATE = 1.0
#: among spans that gain as much within this share, the one that fits the edges of others makes shorter chains
_NEARLY = 0.03


@dataclass
class Coverage:
    """What the servers of a model hold or are about to hold.

    :ivar rates: [blocks] tokens a second, summed over the servers that hold the block
    :ivar holders: [blocks] how many servers these are
    :ivar serving: [blocks] how many servers serve the block now and do not want to leave it
    :ivar edges: [blocks + 1] how many servers' spans begin or end there
    """

    rates: Floats
    holders: npt.NDArray[np.int64]
    serving: npt.NDArray[np.int64]
    edges: npt.NDArray[np.int64]

    @classmethod
    def of(cls, records: Iterable[ServerRecord], blocks: int, *, without: str = "") -> Coverage:
        """What these servers hold of a model with so many blocks, all but the peer `without`."""
        records = [record for record in records if record.peer_id != without]
        unknown = usual_block_rate(records)
        coverage = cls(np.zeros(blocks), *(np.zeros(n, dtype=np.int64) for n in (blocks, blocks, blocks + 1)))
        for record in records:
            coverage.add(record, unknown)
        return coverage

    @property
    def blocks(self) -> int:
        return len(self.rates)

    def add(self, record: ServerRecord, unknown_block_rate: float = _UNKNOWN_RATE, *, sign: int = 1) -> None:
        """Count a server, or with `sign` -1 no longer: the same record that was added."""
        if record.state == "serving" and record.moving_to is None:
            self.serving[record.start : record.end] += sign
        span = destination(record)
        if span is not None:
            start, end = span
            self.rates[start:end] += sign * (block_rate(record) or unknown_block_rate) / (end - start)
            self.holders[start:end] += sign
            for edge in span:
                if edge <= self.blocks:  # others may say what they like
                    self.edges[edge] += sign

    def gains(self, length: int, rate: float) -> Floats:
        """What a server that is not counted yet would take away of the needs, for every first block of its span.

        :param length: of its span
        :param rate: its tokens a second through one block
        """
        through_all = rate / length
        average = (self.rates.sum() + rate) / self.blocks
        gain = self._needs(self.rates, self.holders, average) - self._needs(
            self.rates + through_all, self.holders + 1, average
        )
        sums = np.concatenate([[0.0], np.cumsum(gain)])
        return np.asarray(sums[length:] - sums[:-length], dtype=np.float64)

    def left_without(self, span: Span) -> bool:
        """Whether these servers leave a block of `span` that none of them serves."""
        return bool((self.serving[span[0] : span[1]] == 0).any())

    @staticmethod
    def _needs(rates: Floats, holders: npt.NDArray[np.int64], average: float) -> Floats:
        weak = (np.maximum(rates, 0.0) / average + _LEAST_RATE) ** -_STEEPNESS
        return np.asarray(weak + _HOLE * _FURTHER ** -holders.astype(np.float64), dtype=np.float64)


def destination(record: ServerRecord) -> Span | None:
    """The span that a server holds or is going to hold; None if it leaves."""
    leaves = record.state == "draining"
    return record.moving_to or (None if leaves else (record.start, record.end))


def block_rate(record: ServerRecord) -> float | None:
    """A server's tokens a second through one block; None if it has not measured itself."""
    rate = record.throughput or record.tokens_per_second
    return rate * (record.end - record.start) if rate else None


def usual_block_rate(records: Iterable[ServerRecord]) -> float:
    """What is assumed of a server that has not measured itself: the median of the others."""
    known = [rate for record in records if (rate := block_rate(record))]
    return statistics.median(known) if known else _UNKNOWN_RATE


def best_span(coverage: Coverage, length: int, rate: float) -> Span:
    """The span in which a server helps the weakest blocks most.

    Among spans that help as much, the one that begins or ends where others do, then the first: so where the servers are
    too few to hold all blocks, what they hold grows together from the front.

    :param coverage: of the others
    :param length: how many blocks it can hold
    :param rate: its tokens a second through one block
    """
    length = min(length, coverage.blocks)
    start = _best(coverage, length, coverage.gains(length, rate))
    return start, start + length


def _best(coverage: Coverage, length: int, gains: Floats) -> int:
    (good,) = np.nonzero(gains >= gains.max() * (1 - _NEARLY))
    fits = (coverage.edges[good] > 0).astype(np.int64) + (coverage.edges[good + length] > 0)
    fits += (good == 0).astype(np.int64) + (good + length == coverage.blocks)
    return int(good[fits.argmax()])


def better_claim(coverage: Coverage, span: Span, rate: float, *, clear_gain: float = CLEAR_GAIN) -> Span | None:
    """Where a server should go instead that is on its way to `span`; None if it should go on. For a clear gain only."""
    length = span[1] - span[0]
    gains = coverage.gains(length, rate)
    if gains.max() < clear_gain * gains[span[0]]:
        return None
    start = _best(coverage, length, gains)
    return start, start + length


def better_span(coverage: Coverage, span: Span, rate: float, *, clear_gain: float = CLEAR_GAIN) -> Span | None:
    """Where a server should move to that holds `span`; None if it should stay.

    It moves for a clear gain only, and never if that leaves a block that nobody else serves.

    :param coverage: of the others
    :param rate: its tokens a second through one block
    """
    if coverage.left_without(span):
        return None
    return better_claim(coverage, span, rate, clear_gain=clear_gain)


def jittered(seconds: float, chance: float) -> float:
    """A wait of about so many seconds, so that the servers of a swarm do not all act at once.

    :param chance: a random number in [0, 1)
    """
    return seconds * (0.5 + chance)
