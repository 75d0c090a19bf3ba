"""What an engine has done."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

#: seconds
_DURATIONS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Histogram:
    """How often values fell up to each bound. One thread counts; others may look."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        #: for each bound, and for what is beyond the last
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def saw(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def __repr__(self) -> str:
        count = sum(self.counts)
        return f"{count} of {self.sum / count:.3g} on average" if count else "none"


@dataclass
class Counters:
    """Totals since the engine started."""

    rounds: int = 0
    steps: int = 0
    tokens: int = 0
    #: tokens that a session found in kept pages and did not compute
    reused_tokens: int = 0
    largest_decode_batch: int = 0
    #: of training passes: a block there or back for some rows
    units: int = 0
    failures: int = 0
    #: rows that were computed in one round
    batches: Histogram = field(default_factory=lambda: Histogram(_SIZES))
    #: seconds that each step waited for its first round, and was computed
    queued: Histogram = field(default_factory=lambda: Histogram(_DURATIONS))
    computing: Histogram = field(default_factory=lambda: Histogram(_DURATIONS))
