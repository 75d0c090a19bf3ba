"""A session's steps that wait, and its rhythm: how long it usually stays away between two of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from lilliput.engine.scheduler import Absent
from lilliput.engine.session import Step, StepOutput
from lilliput.errors import LilliputError

#: a session that stays away longer than this is not waited for (seconds)
_FORGET_AFTER = 1.0
_WEIGHT = 0.3


@dataclass
class StepQueue:
    """:ivar left: when the last output left (seconds); 0 before the first"""

    steps: deque[Step] = field(default_factory=deque)
    left: float = 0.0
    _away: float = 0.0

    def add(self, step: Step) -> None:
        """Put a step at the end. One that waits already is answered together with this one."""
        for earlier in self.steps:
            if step.step_id and earlier.step_id == step.step_id:
                earlier.done = _both(earlier.done, step.done)
                return
        if self.left and not self.steps:
            gap = step.arrived - self.left
            self._away += (gap - self._away) * (_WEIGHT if self._away else 1.0)
        self.steps.append(step)

    def absent(self, now: float) -> Absent | None:
        """Whether, and since when, the session stays away that was generating a moment ago."""
        if self.steps or not self._away or now - self.left >= _FORGET_AFTER:
            return None
        return Absent(self.left, self._away)


def _both(
    first: Callable[[StepOutput | LilliputError], None], second: Callable[[StepOutput | LilliputError], None]
) -> Callable[[StepOutput | LilliputError], None]:
    def done(result: StepOutput | LilliputError) -> None:
        first(result)
        second(result)

    return done
