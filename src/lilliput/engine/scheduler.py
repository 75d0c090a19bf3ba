"""Which waiting steps run in the next round, and how many tokens of each. Pure functions of plain records.

Every decode step that waits is taken, then a token budget is filled with slices of prefixes, the highest bid and the
oldest first. So a long prompt never stalls those who are generating: chunked prefill, as in Sarathi.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Waiting:
    """A session's next step, or what is left of it."""

    start: int
    end: int
    rows: int
    #: tokens per row that are left
    tokens: int
    bid: float
    arrived: float
    #: must be computed in one piece (its mask looks ahead)
    whole: bool = False

    @property
    def is_decode(self) -> bool:
        return self.tokens == 1


@dataclass(frozen=True)
class Budget:
    """Tokens that one round may compute for prefixes."""

    #: when nobody is generating: large enough for full speed, small enough that newcomers wait briefly
    alone: int = 512
    #: when someone is: what delays their next token
    beside_decode: int = 128


def plan_round(waiting: Sequence[Waiting], budget: Budget) -> dict[int, int]:
    """Tokens per row to compute, by index into `waiting`.

    A round runs one part of the span; the part with the oldest waiting step is next.
    """
    if not waiting:
        return {}
    oldest = min(waiting, key=lambda w: w.arrived)
    eligible = [i for i, w in enumerate(waiting) if (w.start, w.end) == (oldest.start, oldest.end)]
    taken = {i: 1 for i in eligible if waiting[i].is_decode}
    left = budget.beside_decode if taken else budget.alone
    first = True  # of the prefixes: it moves on in every round, however wide it is
    for i in sorted((i for i in eligible if i not in taken), key=lambda i: (-waiting[i].bid, waiting[i].arrived)):
        step = waiting[i]
        tokens = step.tokens if step.whole else min(step.tokens, max(1, left // step.rows))
        if first or step.rows * tokens <= left:
            taken[i] = tokens
            left -= step.rows * tokens
        first = False
        if left <= 0:
            break
    return taken


@dataclass(frozen=True)
class Absent:
    """A session that was generating a moment ago and has no step waiting."""

    #: when its last output left (seconds)
    left: float
    #: how long it usually takes to come back (seconds)
    away: float


def worth_waiting(absent: Sequence[Absent], *, now: float, first_arrived: float, round_seconds: float) -> float:
    """Seconds to wait for sessions that are about to bring their next token, so that they share a pass; 0 = run now.

    Streams that were computed together come back together, one message after the other. Running the first one alone
    would split them for good, and a pass over the weights costs nearly the same for one row as for eight. Nobody waits
    longer than a fraction of a round, and only for those who are due.
    """
    patience = first_arrived + round_seconds * PATIENCE - now
    if patience <= 0:
        return 0.0
    due = [a for a in absent if abs(now - (a.left + a.away)) <= patience + a.away * 0.25]
    return min(patience, WAIT_SLICE) if due else 0.0


#: share of a round's time that the first step may be held back
PATIENCE = 0.3
#: look again after this long (seconds)
WAIT_SLICE = 0.0005
