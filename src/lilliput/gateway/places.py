"""How many requests are answered at a time, how many may wait, and what the others hear."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator

from lilliput.gateway.problems import Problem

_WEIGHT = 0.2
_FIRST_GUESS_SECONDS = 5.0


class Places:
    """Lets `count` requests in at a time, first come, first served; `waiting` more may wait."""

    def __init__(self, count: int, waiting: int) -> None:
        self._count, self._most_waiting = count, waiting
        self._free = asyncio.Semaphore(count)
        self._waiting = self._taken = 0
        self._seconds = _FIRST_GUESS_SECONDS

    @property
    def taken(self) -> int:
        return self._taken

    @property
    def waiting(self) -> int:
        return self._waiting

    @contextlib.asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """A place for the block. Raises `Problem` 429 if too many wait already."""
        if self._free.locked() and self._waiting >= self._most_waiting:
            wait = math.ceil(self._seconds * (self._waiting + 1) / self._count)
            raise Problem(
                f"Too many requests: {self._count} are being answered and {self._waiting} wait.",
                status=429,
                kind="rate_limit_error",
                code="rate_limit_exceeded",
                headers={"Retry-After": str(max(1, wait))},
            )
        self._waiting += 1
        try:
            await self._free.acquire()
        finally:
            self._waiting -= 1
        began = time.monotonic()
        self._taken += 1
        try:
            yield
        finally:
            self._taken -= 1
            self._seconds += _WEIGHT * (time.monotonic() - began - self._seconds)
            self._free.release()
