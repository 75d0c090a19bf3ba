"""How a command's process behaves among others: those on the same processor, and those at the same terminal."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from functools import cache, partial
from types import FrameType
from typing import NoReturn

_SHOW_CURSOR = b"\r\x1b[K\x1b[?25h"


@cache
def prepare() -> None:
    """Make this process a good neighbour. Call it before torch and hivemind are imported."""
    # Several processes may share few cores; a thread that waits for work must not burn the core that others compute on.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
        signal.signal(signal.SIGHUP, _leave)  # a terminal that closes ends a command in order, as SIGTERM does
    _keep_daemons_off_the_terminal()


@contextlib.contextmanager
def ending_at_once() -> Iterator[None]:
    """In the block a signal ends the process on the spot: for imports, in which an exception may be lost or turned
    into another. There must be nothing yet that needs clearing away."""
    numbers = [number for name in ("SIGINT", "SIGTERM", "SIGHUP") if (number := getattr(signal, name, None))]
    usual = {number: signal.signal(number, _drop_dead) for number in numbers}
    try:
        yield
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """In the block, which must be short, Ctrl-C does nothing: for clearing away."""
    usual = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)


def _leave(signum: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + signum)


def _drop_dead(signum: int, frame: FrameType | None) -> NoReturn:
    with contextlib.suppress(OSError):
        if sys.stderr.isatty():
            os.write(sys.stderr.fileno(), _SHOW_CURSOR)
    os._exit(128 + signum)


def _keep_daemons_off_the_terminal() -> None:
    """Ctrl-C goes to every process of the terminal's foreground group. The p2p daemon would die of it, when we only
    stop an answer, or still have to say goodbye; in a session of its own it hears nothing."""
    import asyncio.subprocess as processes

    spawn = processes.create_subprocess_exec
    processes.create_subprocess_exec = partial(spawn, start_new_session=True)  # type: ignore[assignment]
