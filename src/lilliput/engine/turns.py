"""Servers on one machine compute one after the other, not all at once.

A round that uses all cores is a chain of short operations, and at the end of each its threads wait for each other. Two
servers that compute at the same time take the cores from each other at every such point, and both together need about
twice as long as one after the other (docs/architecture.md has the figures). So a round takes the machine's turn.

The turn is a name in Linux's abstract socket namespace: whoever has bound it has the turn, and it is free again when
that process ends, however it does. Where there are no such names, nobody takes turns.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from types import TracebackType

#: look again after this long (seconds): shorter than a round, longer than it takes to look
_POLL_SECONDS = 0.0002
#: a turn that lasts this much longer than twice our own last one was not waited for (seconds)
_PATIENCE_SECONDS = 0.5
#: and turns are not taken for a while: whoever holds it may be frozen (seconds)
_SULK_SECONDS = 10.0


class Turn:
    """The right to use this process's cores, as a context manager. Belongs to one thread.

    It waits within limits and computes without the turn after that: it makes things fast, not right.
    """

    def __init__(self) -> None:
        self._held: socket.socket | None = None
        self._began = 0.0
        self._last = 0.0
        self._not_before = 0.0
        cores = "-".join(map(str, sorted(os.sched_getaffinity(0)))) if sys.platform == "linux" else ""
        name = f"\0lilliput-{os.getuid() if cores else 0}-{cores}"[:90]
        self._queue, self._turn = f"{name}-queue", f"{name}-turn"
        self.possible = bool(cores)

    def __enter__(self) -> None:
        begun = time.monotonic()
        if self.possible and begun >= self._not_before:
            limit = begun + _PATIENCE_SECONDS + 2 * self._last
            # who waits for the turn is first in the queue: whoever gives it back cannot take it again at once
            first = _bind(self._queue, limit)
            self._held = first and _bind(self._turn, limit)
            if first:
                first.close()
            if self._held is None:
                self._not_before = time.monotonic() + _SULK_SECONDS
        self._began = time.monotonic()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._last = time.monotonic() - self._began
        if self._held:
            self._held.close()
            self._held = None


def _bind(name: str, limit: float) -> socket.socket | None:
    """A socket of that name; None if somebody else has it until `limit`, or if this system has no such names."""
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    while True:
        try:
            bound.bind(name)
            return bound
        except OSError:
            if time.monotonic() > limit:
                bound.close()
                return None
        time.sleep(_POLL_SECONDS)
