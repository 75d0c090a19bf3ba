"""One request on its way through, and where its time goes."""

from __future__ import annotations

import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from lilliput.client.answer_trace import AnswerTrace, Spent, facts
from lilliput.client.costs import RoundTripTimes
from lilliput.client.recovery import Recovery
from lilliput.wire import request_id

#: the status of who hung up before an answer began
_HUNG_UP = 499


@dataclass
class Answer:
    """One answer and where its time went, or in which it was given up."""

    began: float
    prompt_tokens: int
    cached_tokens: int
    tokens: int
    seconds: float
    spent: list[Spent]
    recoveries: list[Recovery]

    def facts(self) -> dict[str, Any]:
        return {
            "began_ms": round(self.began * 1e3, 3),
            "seconds": round(self.seconds, 6),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "tokens": self.tokens,
            "parts": facts(self.spent),
            "recoveries": [str(recovery) for recovery in self.recoveries],
        }


@dataclass
class Visit:
    """A request. Times are in seconds, those of answers from its beginning.

    :ivar state: of the request, as the application keeps it
    """

    id: str
    method: str = ""
    path: str = ""
    state: dict[str, Any] = field(default_factory=dict)
    created: float = field(default_factory=time.time)
    status: int = _HUNG_UP
    seconds: float | None = None
    answers: list[Answer] = field(default_factory=list)
    began: float = field(default_factory=time.perf_counter)

    def saw_answer(self, trace: AnswerTrace, round_trips: RoundTripTimes, **more: Any) -> None:
        """An answer has ended. Parameters as of `AnswerTrace.spent` and `Answer`."""
        spent = trace.spent(round_trips)
        self.answers.append(Answer(trace.began - self.began, seconds=trace.seconds, spent=spent, **more))

    def facts(self) -> dict[str, Any]:
        """For programs."""
        return {
            "id": self.id,
            "object": "request",
            "created": int(self.created),
            "path": self.path,
            "status": None if self.seconds is None else self.status,
            "seconds": None if self.seconds is None else round(self.seconds, 6),
            "answers": [answer.facts() for answer in self.answers],
        }

    def timing(self) -> str:
        """As the header `Server-Timing` has it: milliseconds, those of several answers added up."""
        sums: dict[str, float] = {}
        for spent in (one for answer in self.answers for one in answer.spent):
            name = "network" if spent.place.name == "back" else spent.place.name
            sums[name] = sums.get(name, 0.0) + spent.total
        before = min(answer.began for answer in self.answers)
        sums = {"before": before, **sums, "total": time.perf_counter() - self.began}
        return ", ".join(f"{name};dur={seconds * 1e3:.1f}" for name, seconds in sums.items() if seconds >= 0)


#: set while a request is answered, in all tasks that do so
visit_here: ContextVar[Visit | None] = ContextVar("visit_here", default=None)


def current() -> Visit:
    """The request that is answered here; one that nobody remembers, if none is."""
    return visit_here.get() or Visit(request_id.new())
