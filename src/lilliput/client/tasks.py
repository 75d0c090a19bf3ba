"""Several coroutines at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


async def all_of(tasks: Sequence[asyncio.Task[T]]) -> list[T]:
    """Results in order; the first error ends them all."""
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
