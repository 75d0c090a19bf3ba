"""One session on one server: a stream on which steps go out and outputs come back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from lilliput.client.remote import RemoteModel
from lilliput.client.route import Hop
from lilliput.errors import Busy, LilliputError, Unreachable
from lilliput.wire import lilliput_pb2 as pb
from lilliput.wire.channel import Channel, Received, error_of
from lilliput.wire.limits import PING_FRACTION, SESSION_IDLE_SECONDS
from lilliput.wire.protocol import FORWARD_INCREMENTAL

#: told about every change of place in a server's queue
QueueCallback = Callable[[Hop, pb.Info], None]

_TICK_SECONDS = 2.5
_PING_SECONDS = SESSION_IDLE_SECONDS * PING_FRACTION
_CLOSE_SECONDS = 1.0


@dataclass
class HopStats:
    """What one server reported about one session's steps."""

    steps: int = 0
    computed_tokens: int = 0
    queued_ms: float = 0.0
    compute_ms: float = 0.0
    bytes_sent: int = 0
    bytes_received: int = 0


class ServerSession:
    """A session on the server of `hop`. Open it with `await ServerSession.open(...)`.

    Steps may be sent before earlier ones are answered; the server takes them in order. When the stream breaks, every
    step that waits and every later one raises the same error, kept in `broken`.

    Attributes:
        cached_tokens: of the prefix, found in the server's cache when the session opened
        max_length: tokens per row that the server granted
        limit: the longest `max_length` that it would grant
        max_step_tokens: rows x tokens that it takes in one step
    """

    def __init__(self, remote: RemoteModel, hop: Hop, channel: Channel, max_length: int) -> None:
        self.hop, self.stats = hop, HopStats()
        self.broken: LilliputError | None = None
        self.max_length = self.limit = max_length
        self.max_step_tokens = self.cached_tokens = 0
        self._codec, self._patience = remote.codec, remote.patience
        self._channel = channel
        self._rows = 0
        self._parents: list[int] | None = None
        self._loop = asyncio.get_running_loop()
        self._sending = asyncio.Lock()
        self._waiting: dict[int, tuple[asyncio.Future[tuple[torch.Tensor, pb.Output]], float]] = {}
        self._next_id = 1
        self._last_sent = self._last_heard = self._loop.time()
        self._asked_for_life: float | None = None
        self._reader: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @classmethod
    async def open(
        cls,
        remote: RemoteModel,
        hop: Hop,
        *,
        max_length: int,
        rows: int,
        prefix: bytes = b"",
        bid: float = 0.0,
        session_id: bytes = b"",
        on_queue: QueueCallback | None = None,
    ) -> ServerSession:
        """Ask the server for a session, wait in its queue as long as `patience.queue` allows.

        Raises `Unreachable`, `Busy` with the expected wait, or whatever reason the server has to refuse.
        """
        patience = remote.patience
        channel = await remote.connection.open(hop.peer_id, FORWARD_INCREMENTAL, within=patience.connect)
        session = cls(remote, hop, channel, max_length)
        try:
            await channel.send(
                pb.Message(
                    open=pb.Open(
                        model=remote.name,
                        start=hop.start,
                        end=hop.end,
                        max_length=max_length,
                        rows=rows,
                        bid=bid,
                        adapter=remote.adapter,
                        session_id=session_id,
                        codec=remote.codec,
                        prefix=prefix,
                        no_queue=patience.queue <= 0,
                    )
                )
            )
            info = await session._await_place(on_queue)
        except BaseException as e:
            channel.close()
            if isinstance(e, LilliputError):
                session._named(e)
            raise
        session.cached_tokens = info.cached_tokens
        session.max_step_tokens = info.max_step_tokens or rows
        session.limit = info.max_length or max_length
        session._rows = rows if info.cached_tokens else 0
        session._last_heard = session._loop.time()
        session._reader = asyncio.create_task(session._read())
        session._tick()
        return session

    async def _await_place(self, on_queue: QueueCallback | None) -> pb.Info:
        patience = self._patience
        info = await self._next_info(patience.open)
        if info is None:
            raise Unreachable(f"no answer within {patience.open:.0f} s", self.hop.peer_id)
        until = self._loop.time() + patience.queue
        while not info.accepted:
            if on_queue is not None:
                on_queue(self.hop, info)
            later = await self._next_info(until - self._loop.time())
            if later is None:
                text = f"still {info.queue_length} sessions before this one after {patience.queue:.0f} s"
                raise Busy(text, info.start_seconds or None, info.queue_length)
            info = later
        return info

    async def _next_info(self, within: float) -> pb.Info | None:
        try:
            async with asyncio.timeout(max(within, 0)):
                return (await self._channel.expect("info")).body  # type: ignore[return-value]
        except TimeoutError:
            return None

    def reorder(self, parents: Sequence[int]) -> None:
        """Before the next step, new row i continues old row `parents[i]`."""
        self._parents = [self._parents[p] for p in parents] if self._parents is not None else list(parents)

    async def step(
        self,
        hidden: torch.Tensor,
        *,
        position: int,
        tensors: Mapping[str, torch.Tensor] | None = None,
        hashes: bytes = b"",
        max_length: int = 0,
        request_id: str = "",
    ) -> torch.Tensor:
        """Send `hidden` `[rows, tokens, hidden]` for the places from `position` on; return the outputs, same shape.

        :param tensors: mask, position_ids, prompts, as in `lilliput.proto`
        :param hashes: keys of the grains that the step completes
        :param max_length: ask for a longer session first
        """
        future = await self.send(
            hidden,
            position=position,
            tensors=tensors,
            hashes=hashes,
            max_length=max_length,
            request_id=request_id,
        )
        return await self.output(future)

    async def send(
        self,
        hidden: torch.Tensor,
        *,
        position: int,
        tensors: Mapping[str, torch.Tensor] | None = None,
        hashes: bytes = b"",
        max_length: int = 0,
        request_id: str = "",
    ) -> asyncio.Future[tuple[torch.Tensor, pb.Output]]:
        """The first half of `step`: hand its result to `output`."""
        if self.broken is not None:
            raise self.broken
        rows = hidden.shape[0]
        step_id, self._next_id = self._next_id, self._next_id + 1
        parents, self._parents = self._parents, None
        if self._rows == 0:
            parents = None  # nothing there to be reordered
        elif parents is None and rows != self._rows:
            parents = [min(row, self._rows - 1) for row in range(rows)]
        self._rows = rows
        message = pb.Message(
            step=pb.Step(
                step_id=step_id,
                start_position=position,
                parents=parents,
                hashes=hashes,
                max_length=max_length,
                request_id=request_id,
            )
        )
        future: asyncio.Future[tuple[torch.Tensor, pb.Output]] = self._loop.create_future()
        now = self._loop.time()
        self._waiting[step_id] = future, now + self._patience.step
        try:
            async with self._sending:
                self._last_sent = now
                await self._channel.send(message, {"hidden": hidden, **(tensors or {})}, codec=self._codec)
        except LilliputError as e:
            self._waiting.pop(step_id, None)
            if isinstance(e, Unreachable):
                self._break(e)
            raise
        except BaseException:
            self._waiting.pop(step_id, None)
            self._break(Unreachable("a step was interrupted while it was sent", self.hop.peer_id))
            raise
        self.stats.bytes_sent += sum(header.nbytes for header in message.tensors)
        return future

    async def output(self, future: asyncio.Future[tuple[torch.Tensor, pb.Output]]) -> torch.Tensor:
        """The second half of `step`."""
        hidden, output = await future
        stats = self.stats
        stats.steps += 1
        stats.computed_tokens += output.computed_tokens
        stats.queued_ms += output.queued_ms
        stats.compute_ms += output.compute_ms
        stats.bytes_received += hidden.numel() * hidden.element_size()
        if output.max_length:
            self.max_length = output.max_length
        return hidden

    async def close(self) -> None:
        """Say goodbye and close the stream. May be called twice, and when the stream is broken."""
        if self.broken is None:
            self._fail_waiting(Unreachable("the session was closed", self.hop.peer_id))
            with contextlib.suppress(LilliputError, TimeoutError):
                async with asyncio.timeout(_CLOSE_SECONDS), self._sending:
                    await self._channel.send(pb.Message(close=pb.Close()))
        self._channel.close()
        if self._reader is not None:
            self._reader.cancel()

    # -- what comes back

    async def _read(self) -> None:
        try:
            while (received := await self._channel.receive()) is not None:
                self._last_heard = self._loop.time()
                self._asked_for_life = None
                if received.kind == "output":
                    self._take_output(received)
                elif received.kind == "error":
                    self._take_error(received.body)  # type: ignore[arg-type]
            self._break(Unreachable("the connection broke", self.hop.peer_id))
        except LilliputError as e:
            self._break(e)

    def _take_output(self, received: Received) -> None:
        body: pb.Output = received.body  # type: ignore[assignment]
        hidden = received.tensors.get("hidden")
        if hidden is None:
            raise Unreachable("an output without hidden states", self.hop.peer_id)
        future, _ = self._waiting.pop(body.step_id, (None, 0.0))
        if future is not None and not future.done():
            future.set_result((hidden, body))

    def _take_error(self, body: pb.Error) -> None:
        error = error_of(body)
        future, _ = self._waiting.pop(body.step_id, (None, 0.0))
        if future is not None and not future.done():
            future.set_exception(self._named(error))
        if body.closed:
            raise error

    def _break(self, error: LilliputError) -> None:
        self._fail_waiting(error)
        self._channel.close()

    def _fail_waiting(self, error: LilliputError) -> None:
        if self.broken is None:
            self.broken = self._named(error)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for future, _ in self._waiting.values():
            if not future.done():
                future.set_exception(self.broken)
                future.exception()  # whoever waited may be gone
        self._waiting.clear()

    def _named(self, error: LilliputError) -> LilliputError:
        """The same error, with the server and its blocks in its text."""
        if not str(error).startswith(prefix := f"server {self.hop}: "):
            error.args = (f"{prefix}{error}", *error.args[1:])
        return error

    # -- signs of life

    def _tick(self) -> None:
        """Ping when nothing else was sent for long, or a step waits; give up when nothing comes back."""
        self._timer = self._loop.call_later(_TICK_SECONDS, self._tick)
        now = self._loop.time()
        if self._asked_for_life is not None and now - self._asked_for_life > self._patience.silence:
            return self._give_up(f"no sign of life for {now - self._last_heard:.0f} s")
        if any(deadline < now for _, deadline in self._waiting.values()):
            return self._give_up(f"no output within {self._patience.step:.0f} s")
        quiet = now - max(self._last_heard, self._last_sent)
        if quiet >= (_TICK_SECONDS if self._waiting else _PING_SECONDS - _TICK_SECONDS):
            if self._asked_for_life is None:
                self._asked_for_life = now
            self._last_sent = now
            self._loop.create_task(self._ping())
        return None

    def _give_up(self, why: str) -> None:
        self._break(Unreachable(why, self.hop.peer_id))

    async def _ping(self) -> None:
        with contextlib.suppress(LilliputError):
            async with self._sending:
                await self._channel.send(pb.Message(ping=pb.Ping(id=1)))
