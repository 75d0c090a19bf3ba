"""Commands as a person runs them: with or without a terminal; and what is left of them afterwards."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
import uuid
from pathlib import Path

import psutil
from click.testing import Result
from typer.testing import CliRunner

from lilliput.cli.main import app

#: names what a test starts, in the environment of all its processes
_MARK = "LILLIPUT_TEST_MARK"
_CSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[=>]")


class Family:
    """A command's process and all that it starts, theirs too."""

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex
        self._sockets: set[Path] = set()

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, _MARK: self.mark, "TERM": "xterm", "LILLIPUT_PEERS": "", "HF_HUB_OFFLINE": "1"}

    def processes(self) -> list[psutil.Process]:
        """Those that live."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(_MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def sockets(self) -> set[Path]:
        """The p2p daemons' socket files; also of daemons that lived at an earlier call, if they are still there."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                for path in re.findall(r"/tmp/hivemind-\S+?\.sock", " ".join(process.cmdline())):
                    self._sockets |= {Path(path), Path(path.replace("p2pd", "p2pclient"))}
        return {path for path in self._sockets if path.exists()}

    def assert_gone(self, within: float = 10.0) -> None:
        deadline = time.monotonic() + within
        while self.processes() or self.sockets():
            left = [" ".join(process.cmdline()) for process in self.processes()]
            assert time.monotonic() < deadline, f"left: {left} {self.sockets()}"
            time.sleep(0.1)


def run(*arguments: str, stdin: str = "", family: Family | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command without a terminal, to its end."""
    environment = (family or Family()).environment
    command = [sys.executable, "-m", "lilliput.cli", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, env=environment, timeout=120)


def start(*arguments: str, family: Family) -> subprocess.Popen[str]:
    """Start a command without a terminal."""
    command = [sys.executable, "-m", "lilliput.cli", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=family.environment)


class Terminal:
    """A command at a terminal of its own, its keyboard and its screen."""

    def __init__(self, *arguments: str, family: Family | None = None, columns: int = 120) -> None:
        self.family = family or Family()
        self.screen = ""
        self._read = 0
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.execve(sys.executable, [sys.executable, "-m", "lilliput.cli", *arguments], self.family.environment)
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        self._code: int | None = None

    def see(self, pattern: str, within: float = 60.0) -> re.Match[str]:
        """Wait until the screen shows something, after what was seen before."""
        deadline = time.monotonic() + within
        while (match := re.compile(pattern).search(self.screen, self._read)) is None:
            assert time.monotonic() < deadline, f"no {pattern!r} in {self.unseen[-500:]!r}"
            assert self._look(0.2), f"it ended without {pattern!r} in {self.unseen[-500:]!r}"
        self._read = match.end()
        return match

    @property
    def unseen(self) -> str:
        return self.screen[self._read :]

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def enter(self, text: str) -> None:
        self.type(text + "\r")

    def ctrl(self, letter: str) -> None:
        self.type(chr(ord(letter.upper()) - ord("A") + 1))

    def end(self, within: float = 20.0) -> int:
        """Wait for the command's end, and return its exit code."""
        deadline = time.monotonic() + within
        while self._look(0.2):
            assert time.monotonic() < deadline, f"it has not ended: {self.unseen[-500:]!r}"
        while self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
            assert time.monotonic() < deadline, "its terminal is closed, but it has not ended"
            time.sleep(0.05)
        return self._code

    def hang_up(self) -> None:
        """Close the terminal's window."""
        os.close(self._fd)
        self._fd = -1

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *error: object) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        if self._code is None:
            with contextlib.suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)

    def _look(self, seconds: float) -> bool:
        """Take in what is shown within a while; False at the end."""
        if select.select([self._fd], [], [], seconds)[0]:
            try:
                shown = os.read(self._fd, 65536)
            except OSError:
                return False
            if not shown:
                return False
            self.screen += _CSI.sub("", shown.decode(errors="replace")).replace("\r\n", "\n")
        return True


def invoke(*arguments: str, stdin: str = "") -> Result:
    """Run a command in this process, which has the libraries loaded."""
    environment = {"LILLIPUT_PEERS": "", "HF_HUB_OFFLINE": "1"}
    return CliRunner().invoke(app, list(arguments), input=stdin, env=environment)
