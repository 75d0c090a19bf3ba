"""A swarm of server processes on this machine, for the demo, the benchmark and the tests."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO, TYPE_CHECKING, Any, Protocol, cast

from lilliput.cli.nursery import NO_KEY, Nursery
from lilliput.errors import LilliputError

if TYPE_CHECKING:
    from lilliput.cli.bench.network import Link

_START_SECONDS = 180.0
_STOP_SECONDS = 8.0


class Process(Protocol):
    """What is used of a `subprocess.Popen`."""

    pid: int
    stdin: IO[bytes]
    stdout: IO[bytes]
    stderr: IO[bytes]

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def kill(self) -> None: ...


class LocalServer:
    """One `lilliput serve` process on loopback.

    Attributes:
        stages: what it did so far to start, the current one last
        addresses, peer_id: known once it serves
        metrics: where its numbers for Prometheus are, if it was told to serve them
        start_seconds: from starting the process to its word that it serves
    """

    def __init__(
        self, process: Process, blocks: tuple[int, int] | None, began: float, changed: Callable[[LocalServer], None]
    ) -> None:
        self.process, self._told_blocks = process, blocks
        self.stages: list[str] = []
        self.addresses: list[str] = []
        self.peer_id = self.metrics = ""
        self.start_seconds = 0.0
        self._changed, self._began = changed, began
        self._decided = threading.Event()
        self._complaints: list[str] = []
        self._readers = [threading.Thread(target=read, daemon=True) for read in (self._hear, self._pass_on)]
        for reader in self._readers:
            reader.start()

    @property
    def blocks(self) -> tuple[int, int]:
        """Those it was told to hold, or those it chose first; none before."""
        return self._told_blocks or (0, 0)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def serves(self) -> bool:
        return bool(self.addresses) and self.process.poll() is None

    def join(self, peers: Sequence[str]) -> None:
        """Tell it whom to join: it waits for that."""
        with contextlib.suppress(OSError):  # it has failed already; `wait` says why
            self.process.stdin.write(json.dumps(list(peers)).encode() + b"\n")
            self.process.stdin.flush()

    def wait(self) -> None:
        """Return when it serves; raise why it does not."""
        in_time = self._decided.wait(max(0.0, self._began + _START_SECONDS - time.perf_counter()))
        if self.addresses:
            return
        self.kill()
        self._readers[1].join(1.0)
        reason = self._complaints[-1] if self._complaints else "it ended" if in_time else "it took too long"
        which = f"the server for blocks {self.blocks[0]}:{self.blocks[1]}" if self._told_blocks else "a server"
        raise LilliputError(f"{which} did not start: {reason}")

    def let_go(self) -> None:
        """Tell it to leave; does not wait."""
        with contextlib.suppress(OSError):
            self.process.stdin.close()

    def kill(self) -> None:
        self.let_go()
        self.process.kill()
        self.process.wait()

    def _hear(self) -> None:
        """What it tells its supervisor."""
        with contextlib.suppress(OSError), self.process.stdout as stdout:
            for line in stdout:
                with contextlib.suppress(ValueError):  # a library may print, too
                    self._take(json.loads(line))
        self._decided.set()

    def _take(self, facts: dict[str, Any]) -> None:
        if stage := facts.get("stage"):
            self.stages.append(stage)
        else:
            self.start_seconds = time.perf_counter() - self._began
            self._told_blocks = tuple(facts["blocks"])
            self.peer_id, self.metrics = facts["peer_id"], facts.get("metrics", "")
            self.addresses = facts["addresses"]
            self._decided.set()
        self._changed(self)

    def _pass_on(self) -> None:
        """What it says to a person: while it starts, the last line may be why it fails."""
        with contextlib.suppress(OSError), self.process.stderr as stderr:
            for line in stderr:
                text = line.decode(errors="replace").rstrip()
                if self.addresses:
                    print(text, file=sys.stderr, flush=True)
                elif text:
                    self._complaints.append(text)


class LocalSwarm:
    """Starts servers for `spans` of a model (None: the server chooses), waits until all serve, ends them with the
    `with` block.

    The servers end when this process does, however that happens: they watch the pipe to it.

    :param options: further arguments of `lilliput serve`
    :param links: what leads to each server's port, if not everyone is to come there directly
    :param changed: called, in any thread, when a server has come further
    :param nursery: starts the servers, faster than they start by themselves
    """

    def __init__(
        self,
        model: str,
        spans: Sequence[tuple[int, int] | None],
        *,
        options: Sequence[str] = (),
        links: Sequence[Link] = (),
        changed: Callable[[LocalServer], None] = lambda server: None,
        nursery: Nursery | None = None,
    ) -> None:
        self.model, self.spans, self.options = model, list(spans), list(options)
        self.links = list(links)
        self.changed, self.nursery = changed, nursery
        self.servers: list[LocalServer] = []

    @property
    def initial_peers(self) -> list[str]:
        """Addresses of all servers that run: a swarm outlives any of them."""
        return [address for server in self.servers if server.serves for address in server.addresses]

    def __enter__(self) -> LocalSwarm:
        try:
            self.start(self.spans)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def add(self, blocks: tuple[int, int] | None, options: Sequence[str] = ()) -> LocalServer:
        """Start one more server and wait until it serves."""
        return self.start([blocks], options)[0]

    def start(self, spans: Sequence[tuple[int, int] | None], options: Sequence[str] = ()) -> list[LocalServer]:
        """Start servers, all at the same time, and wait until all serve."""
        known = self.initial_peers
        started: list[LocalServer] = []
        for span in spans:
            arguments = ["serve", self.model, "--host", "127.0.0.1", "--supervised"]
            arguments += ["--blocks", f"{span[0]}:{span[1]}"] if span else []
            arguments += [*self.options, *options]
            if len(self.servers) < len(self.links):
                link = self.links[len(self.servers)]
                arguments += ["--port", str(link.target), "--announce", link.address]
            began = time.perf_counter()
            process = self.nursery.spawn(arguments) if self.nursery else _process(arguments)
            started.append(LocalServer(process, span, began, self.changed))
            self.servers.append(started[-1])
        if not known:  # the first begins a swarm; the others wait for it with their libraries loaded
            first, *started = started
            first.join([])
            first.wait()
            known = first.addresses
        for server in started:
            server.join(known)
        for server in started:
            server.wait()
        return self.servers[-len(spans) :]

    def stop(self) -> None:
        """End all servers; kill those that do not leave in time."""
        for server in self.servers:
            server.let_go()
        deadline = time.monotonic() + _STOP_SECONDS
        for server in self.servers:
            try:
                server.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                server.kill()


def _process(arguments: Sequence[str]) -> Process:
    """`lilliput ARGUMENTS`, in a session of its own: Ctrl-C in the terminal is for us, and we end servers in order."""
    command = [sys.executable, "-m", "lilliput.cli", *arguments]
    pipe = subprocess.PIPE
    made = subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, env={**os.environ, **NO_KEY}, start_new_session=True
    )
    return cast(Process, made)
