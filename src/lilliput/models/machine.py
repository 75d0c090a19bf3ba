"""This machine's memory: how much is free, and how fast it is read."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

_PART_BYTES = 64 << 20
_TRIES = 3


def free_bytes() -> int:
    """Memory that programs may still take, in bytes: the machine's, or its container's if that is less."""
    import psutil

    free = int(psutil.virtual_memory().available)
    try:
        with open("/sys/fs/cgroup/memory.max") as most, open("/sys/fs/cgroup/memory.current") as used:
            limit = most.read().strip()
            return free if limit == "max" else min(free, int(limit) - int(used.read()))
    except (OSError, ValueError):
        return free


def bytes_a_second() -> float:
    """How fast all cores together read memory that no cache holds: the best of a few tries, in 0.1 s or so."""
    import numpy as np
    import psutil

    cores = psutil.cpu_count(logical=False) or 1
    parts = [np.ones(_PART_BYTES // 4, dtype=np.float32) for _ in range(min(cores, 16))]
    best = 0.0
    with ThreadPoolExecutor(len(parts)) as threads:
        for _ in range(_TRIES):
            begun = time.perf_counter()
            list(threads.map(np.max, parts))
            best = max(best, _PART_BYTES * len(parts) / (time.perf_counter() - begun))
    return best
