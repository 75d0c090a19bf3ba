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


class Nursery:
    """Loads libraries from now on. End it with `close` or a `with` block, after its servers; it ends with us, too."""

    def __init__(self) -> None:
        self._loaded = False
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "lilliput.cli.nursery"],
                stdin=theirs.fileno(),
                start_new_session=True,
                # a library that starts threads when it is imported would make it unsafe to fork
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
            )

    def spawn(self, arguments: Sequence[str]) -> Forked:
        """Start `lilliput ARGUMENTS`, when the libraries are loaded."""
        pipes = [os.pipe() for _ in range(_STREAMS)]
        ours = [pipes[0][1], *(pipe[0] for pipe in pipes[1:])]
        theirs = [pipes[0][0], *(pipe[1] for pipe in pipes[1:])]
        try:
            with contextlib.suppress(OSError):
                socket.send_fds(self._socket, [json.dumps(list(arguments)).encode()], theirs)
            answer = self._socket.recv(_MESSAGE_BYTES)
        except BaseException:
            for end in ours:
                os.close(end)
            raise
        finally:
            for end in theirs:
                os.close(end)
        if not answer:
            raise LilliputError("the process that starts the servers has ended")
        self._loaded = True
        return Forked(int(answer), ours)

    def close(self) -> None:
        self._socket.close()
        if not self._loaded:  # it does not hear us
            self._process.kill()
        self._process.wait()

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Forked:
    """A server's process, as far as a `subprocess.Popen` would be used."""

    def __init__(self, pid: int, streams: Sequence[int]) -> None:
        self.pid = pid
        self.stdin: IO[bytes] = os.fdopen(streams[0], "wb")
        self.stdout: IO[bytes] = os.fdopen(streams[1], "rb")
        self.stderr: IO[bytes] = os.fdopen(streams[2], "rb")
        self._alive: IO[bytes] = os.fdopen(streams[3], "rb")

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


def _main() -> None:
    """The nursery's own process. Orders come through the socket that is its standard input."""
    process.end_with_parent(signal.SIGKILL)
    process.share_cores()
    logs.set_up()
    from lilliput.collector import collector_paused

    with collector_paused():
        import lilliput.server.server  # noqa: F401
    process.end_with_parent(0)  # from here on, the socket tells
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how they ended
    with socket.socket(fileno=os.dup(0)) as boss:
        while True:
            order, streams, *_ = socket.recv_fds(boss, _MESSAGE_BYTES, _STREAMS)
            if not order:
                with contextlib.suppress(ChildProcessError):
                    os.wait()  # for all
                return
            pid = os.fork()
            if pid == 0:
                break
            for stream in streams:
                os.close(stream)
            boss.send(str(pid).encode())
    _become_server(json.loads(order), streams)


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
    _main()
