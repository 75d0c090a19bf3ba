"""How a command's process behaves among others: those on the same processor, and those at the same terminal."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from types import FrameType
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_STDERR = 2
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
_SPIN_COUNT = "10000"
_SHOW_CURSOR = b"\r\x1b[K\x1b[?25h"


def open_standard_streams() -> None:
    """Where standard input, output or error is closed, have nothing there.

    Else what is opened next, a socket or a file, gets that number: libuv aborts, and others write into it.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        os.set_inheritable(number, True)
    os.close(number)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115


@cache
def prepare() -> None:
    """Make this process a good neighbour. Call it before torch and hivemind are imported."""
    share_cores()
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
        signal.signal(signal.SIGHUP, _leave)  # a terminal that closes ends a command in order, as SIGTERM does


def share_cores() -> None:
    """Have torch's threads wait for work briefly. Call it before torch is imported.

    Between two operations a waiting thread spins, by default for milliseconds: it burns the core on which another
    server, or the client, could compute. Put to sleep at once, it takes longer to wake than most operations take. This
    many turns (about 0.2 ms) bridge the gaps inside a step and nothing else.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)


def end_with_parent(signum: int) -> None:
    """Get a signal when the thread that started this process ends, however it does; only Linux can."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signum)


@contextlib.contextmanager
def ending_at_once() -> Iterator[None]:
    """In the block a signal ends the process on the spot: for imports, in which an exception may be lost or turned
    into another. There must be nothing yet that needs clearing away."""
    with _handling_signals(_drop_dead):
        yield


@contextlib.contextmanager
def signals_noted() -> Iterator[list[int]]:
    """In the block signals interrupt nothing; yields the list of those that came."""
    came: list[int] = []
    with _handling_signals(lambda signum, frame: came.append(signum)):
        yield came


def wind_up() -> None:
    """From now on signals do nothing: the process ends anyway, and what they raise would end as a traceback."""
    for number in _signals():
        signal.signal(number, signal.SIG_IGN)


def _signals() -> list[int]:
    return [number for name in ("SIGINT", "SIGTERM", "SIGHUP") if (number := getattr(signal, name, None))]


@contextlib.contextmanager
def _handling_signals(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    usual = {number: signal.signal(number, handler) for number in _signals()}
    try:
        yield
    finally:
        for number, before in usual.items():
            signal.signal(number, before)


def abandon(threads: Iterable[threading.Thread], code: int) -> None:
    """If these (daemon) threads still run when the process ends, end it on the spot, with exit code `code`.

    What libraries do in a thread cannot be interrupted, may take minutes, and crashes while the interpreter winds up.
    """
    threads = list(threads)

    def end() -> None:
        if any(thread.is_alive() for thread in threads):
            with contextlib.suppress(OSError):
                sys.stdout.flush()
            os._exit(code)

    atexit.register(end)


@contextlib.contextmanager
def abandoning(thread: threading.Thread) -> Iterator[None]:
    """Should an exception end the block, the thread is not waited for: see `abandon`."""
    try:
        yield
    except KeyboardInterrupt:
        abandon([thread], 130)
        raise
    except BaseException as e:
        abandon([thread], e.code if isinstance(e, SystemExit) and isinstance(e.code, int) else 1)
        raise


def _leave(signum: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + signum)


def _drop_dead(signum: int, frame: FrameType | None) -> NoReturn:
    with contextlib.suppress(OSError):
        if sys.stderr.isatty():
            os.write(sys.stderr.fileno(), _SHOW_CURSOR)
    os._exit(128 + signum)
