"""How this process gives memory back."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEEP_BYTES = 256 << 20


def keep_freed_memory() -> None:
    """Keep up to 256 MB of freed memory for the next tensor, instead of giving it back at once.

    glibc returns every block above 128 KB to the system when it is freed. The next step's activations then fault their
    pages in again, which costs more than the operations on them.
    """
    if sys.platform != "linux":
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return
    mallopt(_M_MMAP_THRESHOLD, _KEEP_BYTES)
    mallopt(_M_TRIM_THRESHOLD, _KEEP_BYTES)
