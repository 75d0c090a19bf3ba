"""A process that has a server's libraries loaded, and makes servers by forking.

Importing them is nearly all of what a server does to start. From a nursery it starts in half a second, and servers of
one nursery share the libraries' memory. Its process runs no threads, so nothing is lost in a fork.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import IO

from lilliput.cli import logs, process
from lilliput.errors import LilliputError

_MESSAGE_BYTES = 1 << 16
#: standard streams, and a pipe that closes when the server's process ends
_STREAMS = 4
#: for servers that nobody stopped to leave in
_LEAVE_SECONDS = 8.0

#: servers on loopback are of a swarm of their own, whatever key the environment names
NO_KEY = {"LILLIPUT_SWARM_KEY": ""}


class Nursery:
    """Loads libraries from now on. End it with `close` or a `with` block: its servers are told to leave, also one whose
    making was interrupted by a signal, so that nobody knows it. It ends with us, too."""

    def __init__(self) -> None:
        self._loaded = False
        self._tethers: list[IO[bytes]] = []  # a server leaves when its own is closed
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "lilliput.cli.nursery", str(os.getpid())],
                stdin=theirs.fileno(),
                start_new_session=True,
                # a library that starts threads when it is imported would make it unsafe to fork
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1", **NO_KEY},
            )

    def spawn(self, arguments: Sequence[str]) -> Forked:
        """Start `lilliput ARGUMENTS`, when the libraries are loaded."""
        stdin, *outputs = [os.pipe() for _ in range(_STREAMS)]
        ours: list[IO[bytes]] = [os.fdopen(stdin[1], "wb"), *(os.fdopen(output[0], "rb") for output in outputs)]
        self._tethers.append(ours[0])
        theirs = [stdin[0], *(output[1] for output in outputs)]
        pid = b""
        try:
            with contextlib.suppress(OSError):
                socket.send_fds(self._socket, [json.dumps(list(arguments)).encode()], theirs)
                pid = self._socket.recv(_MESSAGE_BYTES)
        finally:
            for end in theirs:
                os.close(end)
        if not pid:
            raise LilliputError("the process that starts the servers has ended")
        self._loaded = True
        return Forked(int(pid), *ours)

    def close(self) -> None:
        for tether in self._tethers:
            with contextlib.suppress(OSError):
                tether.close()
        self._socket.close()
        if self._loaded:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_LEAVE_SECONDS)
        self._process.kill()  # before it has loaded, it does not hear us
        self._process.wait()

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Forked:
    """A server's process, as far as a `subprocess.Popen` would be used."""

    def __init__(self, pid: int, stdin: IO[bytes], stdout: IO[bytes], stderr: IO[bytes], alive: IO[bytes]) -> None:
        self.pid, self.stdin, self.stdout, self.stderr = pid, stdin, stdout, stderr
        self._alive = alive

    def poll(self) -> int | None:
        """None while it runs; of its end, no more than that is known."""
        return 0 if select.select([self._alive], [], [], 0)[0] else None

    def wait(self, timeout: float | None = None) -> int:
        if not select.select([self._alive], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("lilliput serve", timeout or 0.0)
        return 0

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def _main(parent: int) -> None:
    """The nursery's own process. Orders come through the socket that is its standard input."""
    process.end_with_parent(signal.SIGKILL)
    if os.getppid() != parent:  # it has ended already
        return
    process.share_cores()
    logs.set_up()
    from lilliput.collector import collector_paused

    with contextlib.suppress(ImportError), collector_paused():  # a server without them says what is wrong
        import lilliput.server.server  # noqa: F401
    process.end_with_parent(0)  # from here on, the socket tells
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how they ended
    while True:
        order, streams = _next_order()
        if not order:
            break
        pid = os.fork()
        if pid == 0:
            return _become_server(json.loads(order), streams)
        for stream in streams:
            os.close(stream)
        with contextlib.suppress(OSError):
            os.write(0, str(pid).encode())
    with contextlib.suppress(ChildProcessError):
        os.wait()  # for all


def _next_order() -> tuple[bytes, list[int]]:
    """Arguments and streams; nothing when nobody can give orders any more."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(0)) as boss:
        order, streams, *_ = socket.recv_fds(boss, _MESSAGE_BYTES, _STREAMS)
        return order, streams
    return b"", []


def _become_server(arguments: list[str], streams: Sequence[int]) -> None:
    os.setsid()  # Ctrl-C in a terminal is not for it
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, stream in enumerate(streams[:3]):
        os.dup2(stream, number)
        os.close(stream)
    # the last one stays open as long as the process lives
    sys.argv = ["lilliput", *arguments]
    from lilliput.cli.main import main

    main()


if __name__ == "__main__":
    _main(int(sys.argv[1]))
