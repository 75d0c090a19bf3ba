"""A swarm of server processes on this machine, for the demo, the benchmark and the tests."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lilliput.errors import LilliputError

_START_SECONDS = 180.0
_STOP_SECONDS = 8.0


@dataclass
class LocalServer:
    """One `lilliput serve` process on loopback."""

    process: subprocess.Popen[bytes]
    blocks: tuple[int, int]
    began: float
    addresses: list[str] = field(default_factory=list)
    peer_id: str = ""
    #: from starting the process to its first word that it serves
    start_seconds: float = 0.0

    @property
    def pid(self) -> int:
        return self.process.pid


class LocalSwarm:
    """Starts servers for `spans` of a model, waits until all serve, ends them with the `with` block.

    The servers end when this process does, however that happens: they watch the pipe to it.

    :param options: further arguments of `lilliput serve`
    :param progress: called with the number of servers that serve
    """

    def __init__(
        self,
        model: str,
        spans: Sequence[tuple[int, int]],
        *,
        options: Sequence[str] = (),
        progress: Callable[[int], None] = lambda serving: None,
    ) -> None:
        self.model, self.spans, self.options, self.progress = model, list(spans), list(options), progress
        self.servers: list[LocalServer] = []

    @property
    def initial_peers(self) -> list[str]:
        """Addresses of all servers that still run: a swarm outlives any of them."""
        return [a for server in self.servers if server.process.poll() is None for a in server.addresses]

    def __enter__(self) -> LocalSwarm:
        try:
            first, *others = self.spans
            self.add(first)  # the others join it
            self.start([*others])
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def add(self, blocks: tuple[int, int], options: Sequence[str] = ()) -> LocalServer:
        """Start one more server and wait until it serves."""
        return self.start([blocks], options)[0]

    def start(self, spans: Sequence[tuple[int, int]], options: Sequence[str] = ()) -> list[LocalServer]:
        """Start servers at the same time and wait until all serve."""
        started = [self._spawn(blocks, options) for blocks in spans]
        self.servers.extend(started)
        for server in started:
            self._await(server)
            self.progress(sum(bool(s.addresses) for s in self.servers))
        return started

    def stop(self) -> None:
        """End all servers; kill those that do not leave in time."""
        for server in self.servers:
            with contextlib.suppress(OSError):
                assert server.process.stdin is not None
                server.process.stdin.close()
        deadline = time.monotonic() + _STOP_SECONDS
        for server in self.servers:
            try:
                server.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                server.process.kill()
                server.process.wait()
            assert server.process.stdout is not None
            server.process.stdout.close()

    def _spawn(self, blocks: tuple[int, int], options: Sequence[str]) -> LocalServer:
        command = [sys.executable, "-m", "lilliput.cli", "serve", self.model]
        command += ["--blocks", f"{blocks[0]}:{blocks[1]}", "--host", "127.0.0.1", "--json", "--until-stdin-closes"]
        for address in self.initial_peers:
            command += ["--initial-peers", address]
        # a session of its own: Ctrl-C in the terminal is for us, and we end the servers in order
        process = subprocess.Popen(
            [*command, *self.options, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        return LocalServer(process, blocks, time.perf_counter())

    def _await(self, server: LocalServer) -> None:
        line, complaint = _first_line(server.process, _START_SECONDS)
        try:
            facts: dict[str, Any] = json.loads(line)
        except ValueError:
            server.process.kill()
            server.process.wait()
            words = complaint.strip().splitlines()[-1:] or [f"it ended with code {server.process.returncode}"]
            raise LilliputError(f"the server for blocks {server.blocks[0]}:{server.blocks[1]} did not start: {words[0]}") from None
        server.start_seconds = time.perf_counter() - server.began
        server.addresses, server.peer_id = facts["addresses"], facts["peer_id"]
        _drain(server.process)


def _first_line(process: subprocess.Popen[bytes], seconds: float) -> tuple[str, str]:
    """The first line of standard output, and what came on standard error meanwhile."""
    assert process.stdout is not None
    assert process.stderr is not None
    texts = {process.stdout: b"", process.stderr: b""}
    deadline = time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:
        for stream in texts:
            selector.register(stream, selectors.EVENT_READ)
        while selector.get_map() and b"\n" not in texts[process.stdout]:
            if time.monotonic() > deadline:
                return "", f"it was not ready within {seconds:.0f} s"
            for key, _ in selector.select(0.5):
                chunk = os.read(key.fd, 65536)
                if chunk:
                    texts[key.fileobj] += chunk  # type: ignore[index]
                else:
                    selector.unregister(key.fileobj)
    return (texts[stream].decode(errors="replace") for stream in texts)  # type: ignore[return-value]


def _drain(process: subprocess.Popen[bytes]) -> None:
    """Pass on what a server says later: a pipe that nobody reads would stop it some day."""
    import threading

    def copy() -> None:
        assert process.stderr is not None
        with contextlib.suppress(OSError, ValueError):
            for line in process.stderr:
                sys.stderr.write(line.decode(errors="replace"))
        with contextlib.suppress(OSError):
            process.stderr.close()

    threading.Thread(target=copy, daemon=True).start()
