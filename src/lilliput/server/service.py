"""What all calls of one server share."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch

from lilliput.engine.engine import Engine
from lilliput.engine.table import kept_tokens
from lilliput.engine.training import Pass
from lilliput.errors import BadRequest, Busy, Draining, LilliputError, WrongBlocks
from lilliput.models.span import Span
from lilliput.server.admission import Admission
from lilliput.wire.limits import FIRST_STEP_SECONDS, SESSION_IDLE_SECONDS, UNUSED_SECONDS

if TYPE_CHECKING:
    from lilliput.server.client_stream import ClientStream
    from lilliput.server.push import PushStreams
    from lilliput.server.served_session import ServedSession


#: so many passes of one peer are in the engine's hands at a time; its others wait until those are done
_PASSES_AT_ONCE = 8
#: a peer that has too many is told to come back after so long (seconds)
_PASS_WAIT_SECONDS = 1.0
#: the queue is looked through no more often than twice in this (seconds)
_LOOK_SECONDS = 0.05


class PeerLoad:
    """What one peer has under way at this server, over all its streams.

    :ivar step_bytes: of the steps that are not answered yet
    :ivar room: set when those become fewer
    """

    def __init__(self) -> None:
        self.step_bytes = self.passes = 0
        self.room = asyncio.Event()
        self.turns = asyncio.Semaphore(_PASSES_AT_ONCE)


@dataclass
class Service:
    """A span behind an engine, and the rules for using it."""

    model: str
    span: Span
    engine: Engine
    admission: Admission
    #: rows x tokens in one step
    max_step_tokens: int = 4096
    first_step_seconds: float = FIRST_STEP_SECONDS
    idle_seconds: float = SESSION_IDLE_SECONDS
    unused_seconds: float = UNUSED_SECONDS
    #: whether a prefix's pages are shared between clients (in a swarm whose members trust each other)
    share_prefixes: bool = False
    draining: bool = False
    #: the streams with sessions that are open
    streams: set[ClientStream] = field(default_factory=set)
    #: sessions that other servers may push to, by their keys
    pushed_sessions: dict[bytes, ServedSession] = field(default_factory=dict)
    #: to and from other servers; none while the server starts
    pushes: PushStreams | None = None
    #: forward and backward passes that wait or run, and how many may
    passes: int = 0
    max_passes: int = 256
    #: what each peer has under way here
    loads: WeakValueDictionary[str, PeerLoad] = field(default_factory=WeakValueDictionary)
    _watching: bool = False
    #: how long sessions have lasted, a moving average (seconds)
    session_seconds: float = 20.0

    def check_blocks(self, model: str, start: int, end: int) -> None:
        """Raise `WrongBlocks` or `Draining` unless this server serves blocks `[start, end)` of `model` now."""
        if self.draining:
            raise Draining("this server is about to leave and takes nothing new")
        if model and model != self.model:
            raise WrongBlocks(f"this server serves {self.model}, not {model}")
        if not self.span.start <= start < end <= self.span.end:
            raise WrongBlocks(
                f"this server holds blocks {self.span.start}:{self.span.end} of {self.model}, not {start}:{end}"
            )

    def pages_for(self, start: int, end: int, rows: int, max_length: int) -> int:
        """Pages that a session over blocks `[start, end)` may come to hold. Raises what `Admission.pages_for` does."""
        kept = kept_tokens(self.span.groups_of(start, end), -(-self.max_step_tokens // rows))
        return self.admission.pages_for(rows, max_length, kept)

    def load_of(self, peer: str) -> PeerLoad:
        """What a peer has under way here; to be kept as long as it has."""
        load = self.loads.get(peer)
        if load is None:
            load = self.loads[peer] = PeerLoad()
        return load

    def expected_wait(self, queue_length: int) -> float:
        """Seconds until a session can start behind `queue_length` others."""
        return queue_length * self.session_seconds / max(1, self.admission.running)

    def watch_queue(self) -> None:
        """While sessions wait, see now and then whether a peer has held more than its share for long enough."""
        if self._watching or not self.admission.waiting:
            return
        self._watching = True

        def look() -> None:
            self._watching = False
            self.admission.refresh()
            self.watch_queue()

        asyncio.get_running_loop().call_later(max(self.admission.fair_seconds, _LOOK_SECONDS) / 2, look)

    def saw_session(self, opened: float) -> None:
        self.session_seconds += 0.1 * (time.monotonic() - opened - self.session_seconds)

    async def run_pass(self, job: Pass, peer: str) -> torch.Tensor:
        """A forward or backward pass of a peer, awaited. Raises what the engine reports."""
        if job.hidden.dim() == 3 and job.hidden.shape[1] > self.admission.max_length:
            raise BadRequest(
                f"{job.hidden.shape[1]} tokens a row; this server takes at most {self.admission.max_length}"
            )
        if self.passes >= self.max_passes:
            raise Busy(f"{self.passes} forward and backward passes are under way, which is this server's limit")
        load = self.load_of(peer)
        if load.passes >= max(_PASSES_AT_ONCE, self.max_passes // 4):
            text = f"{load.passes} forward and backward passes of yours are under way, the limit for one peer"
            raise Busy(text, _PASS_WAIT_SECONDS)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[torch.Tensor] = loop.create_future()

        def resolve(result: torch.Tensor | LilliputError) -> None:
            if future.done():
                return
            if isinstance(result, LilliputError):
                future.set_exception(result)
            else:
                future.set_result(result)

        def done(result: torch.Tensor | LilliputError) -> None:
            with contextlib.suppress(RuntimeError):  # the loop may be gone when the server stops
                loop.call_soon_threadsafe(resolve, result)

        job.done = done
        self.passes += 1
        load.passes += 1
        try:
            async with load.turns:  # one peer's passes are not all computed before another's
                self.engine.run_pass(job)
                return await future
        finally:
            self.passes -= 1
            load.passes -= 1
            job.given_up = future.cancelled()
