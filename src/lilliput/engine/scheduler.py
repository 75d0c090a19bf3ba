"""Which waiting steps run in the next round, and how many tokens of each. Pure functions of plain records.

The decode steps that wait are taken, then a token budget is filled with slices of prefixes. So a long prompt never
stalls those who are generating: chunked prefill, as in Sarathi.

Where one peer brings more than others, those wait for a share of it and no more (weighted fair queueing, with equal
weights): each prefix has the place that it would finish in if all peers' prefixes were computed side by side, a
token of each in turn. A peer's own come one after the other, the highest bid first, then the oldest.
"""

from __future__ import annotations

from collections import Counter
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
    #: whose it is; what this peer has had so far as in `fairness.PeerTurns`
    peer: str = ""
    prefix_tokens: float = 0.0
    last_led: int = 0

    @property
    def is_decode(self) -> bool:
        return self.tokens == 1


@dataclass(frozen=True)
class Budget:
    """Tokens that one round may compute."""

    #: when nobody is generating: large enough for full speed, small enough that newcomers wait briefly
    alone: int = 512
    #: when someone is: what delays their next token
    beside_decode: int = 128
    #: for those who are generating
    decode: int = 512


def plan_round(waiting: Sequence[Waiting], budget: Budget) -> dict[int, int]:
    """Tokens per row to compute, by index into `waiting`.

    A round runs one part of the span, that of the step that leads.
    """
    if not waiting:
        return {}
    first_of_all = waiting[leading(waiting)]
    part = first_of_all.start, first_of_all.end
    eligible = [i for i, w in enumerate(waiting) if (w.start, w.end) == part]
    taken = _decode_steps(waiting, [i for i in eligible if waiting[i].is_decode], budget.decode)
    left = budget.beside_decode if taken else budget.alone
    first = True  # of the prefixes: it moves on in every round, however wide it is
    for i in _fair_order(waiting, [i for i in eligible if not waiting[i].is_decode]):
        step = waiting[i]
        tokens = step.tokens if step.whole else min(step.tokens, max(1, left // step.rows))
        if first or step.rows * tokens <= left:
            taken[i] = tokens
            left -= step.rows * tokens
        first = False
        if left <= 0:
            break
    return taken


def leading(waiting: Sequence[Waiting]) -> int:
    """Whose part of the span is next: the oldest step of the peer that has led no round for longest."""
    return min(range(len(waiting)), key=lambda i: (waiting[i].last_led, waiting[i].arrived))


def _decode_steps(waiting: Sequence[Waiting], steps: Sequence[int], budget: int) -> dict[int, int]:
    """All of them, unless there are too many: then some of each peer's, and the oldest in any case."""
    taken: dict[int, int] = {}
    had = Counter[str]()
    order: list[tuple[int, int]] = []
    for i in sorted(steps, key=lambda i: waiting[i].arrived):
        had[waiting[i].peer] += waiting[i].rows
        order.append((had[waiting[i].peer] if order else 0, i))
    for _, i in sorted(order):
        if budget <= 0:
            break
        taken[i] = 1
        budget -= waiting[i].rows
    return taken


def _fair_order(waiting: Sequence[Waiting], steps: Sequence[int]) -> list[int]:
    """The order in which prefixes would finish if all peers' were computed side by side."""
    had = Counter[str]()
    order: list[tuple[float, float, int]] = []
    for i in sorted(steps, key=lambda i: (-waiting[i].bid, waiting[i].arrived)):
        step = waiting[i]
        had[step.peer] += step.rows * step.tokens
        order.append((step.prefix_tokens + had[step.peer], step.arrived, i))
    return [i for _, _, i in sorted(order)]


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
