"""What computes here, its memory, and how fast that is read."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from lilliput.errors import ModelError

if TYPE_CHECKING:
    import torch

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


def device_called(name: str) -> torch.device:
    """`cpu`, `cuda` or `cuda:1`. Raises `ModelError` if there is none such."""
    import torch

    try:
        device = torch.device(name)
    except RuntimeError as e:
        raise ModelError(f"{name!r} is no device such as cpu, cuda or cuda:1") from e
    if device.type == "cuda" and (device.index or 0) < torch.cuda.device_count():
        return torch.device("cuda", device.index or 0)
    if device != torch.device("cpu"):
        raise ModelError(f"there is no device {name} here: this PyTorch sees {torch.cuda.device_count()} of CUDA's")
    return device


def memory_of(device: torch.device) -> tuple[int, int]:
    """How much is free, and how much there is, in bytes."""
    import psutil
    import torch

    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(free), int(total)
    return free_bytes(), int(psutil.virtual_memory().total)


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
