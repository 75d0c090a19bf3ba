"""How this process takes memory, and gives it back."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEEP_BYTES = 256 << 20
#: what glibc begins with, before it learns from what is freed
_GIVE_BACK_BYTES = 128 << 10


def keep_freed_memory() -> None:
    """Keep up to 256 MB of freed memory for the next tensor, instead of giving it back at once.

    glibc returns every block above 128 KB to the system when it is freed. The next step's activations then fault their
    pages in again, which costs more than the operations on them.
    """
    _thresholds(_KEEP_BYTES)


@contextlib.contextmanager
def giving_back() -> Iterator[None]:
    """While this lasts, a tensor's memory goes back to the system when it is freed; after it, freed memory is kept.

    For loading: what is made and freed on the way would lie between what stays, and be taken for good.
    """
    _thresholds(_GIVE_BACK_BYTES)
    try:
        yield
    finally:
        _glibc("malloc_trim", 0)
        keep_freed_memory()


def forget(tensor: torch.Tensor) -> None:
    """Let the system have the memory behind a tensor that is a part of a mapped file, and was only read.

    The file stays mapped as long as any tensor of it is used. Who reads this one again gets it from the disk. For other
    tensors nothing is done.
    """
    page = mmap.PAGESIZE
    begin, end = -(-tensor.data_ptr() // page) * page, (tensor.data_ptr() + tensor.nbytes) // page * page
    if begin < end and _is_of_a_file(begin, end):
        _glibc("madvise", ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)


def _is_of_a_file(begin: int, end: int) -> bool:
    """Whether these addresses belong to a mapped file."""
    try:
        with open("/proc/self/maps") as maps:
            for line in maps:
                where, _, _, _, inode, *_ = line.split()
                first, last = (int(address, 16) for address in where.split("-"))
                if first <= begin < last:
                    return end <= last and inode != "0"
    except (OSError, ValueError):
        pass
    return False


def _thresholds(size: int) -> None:
    _glibc("mallopt", _M_MMAP_THRESHOLD, size)
    _glibc("mallopt", _M_TRIM_THRESHOLD, size)


def _glibc(function: str, *arguments: object) -> None:
    """Call a function of the C library, if it is glibc."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            getattr(ctypes.CDLL(None), function)(*arguments)
