"""One session on one server: steps go out, outputs come back."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from lilliput.client.peer_stream import PeerStream
from lilliput.client.remote import RemoteModel
from lilliput.client.route import Hop
from lilliput.errors import Busy, LilliputError, SessionExpired, Unreachable
from lilliput.wire import lilliput_pb2 as pb
from lilliput.wire.channel import Received, error_of
from lilliput.wire.limits import PING_FRACTION, PUSH_KEY_BYTES, SESSION_IDLE_SECONDS

#: told about every change of place in a server's queue
QueueCallback = Callable[[Hop, pb.Info], None]

_TICK_SECONDS = 1.0
_PING_SECONDS = SESSION_IDLE_SECONDS * PING_FRACTION


@dataclass(frozen=True)
class Reply:
    """What came of a step: hidden states or an error.

    :ivar session: where it came from
    :ivar hidden: outputs `[rows, tokens, hidden]`
    :ivar before: what the servers that the step passed before spent on it
    :ivar own: what this one did
    """

    session: ServerSession
    hidden: torch.Tensor | None = None
    error: LilliputError | None = None
    before: Sequence[pb.Timing] = ()
    own: pb.Output | None = None


Answer = asyncio.Future[Reply]


@dataclass
class _Awaited:
    """A step's answer, how long it may take (the loop's time), and how much was sent for it from here."""

    answer: Answer
    deadline: float
    nbytes: int = 0


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

    Steps may be sent before earlier ones are answered; the server takes them in order. When the session ends, every
    step that waits is answered with the same error, kept in `broken`.

    Attributes:
        cached_tokens: of the prefix, found in the server's cache when the session opened
        max_length: tokens per row that the server granted
        limit: the longest `max_length` that it would grant
        max_step_tokens: rows x tokens that it takes in one step
        leaving: the server has said that it is about to leave
        on_leaving: called when it says so
        push_key: lets other servers push steps into the session; empty: none may
    """

    def __init__(self, remote: RemoteModel, hop: Hop, stream: PeerStream, max_length: int) -> None:
        self.hop, self.stats = hop, HopStats()
        self.broken: LilliputError | None = None
        self.max_length = self.limit = max_length
        self.max_step_tokens = self.cached_tokens = 0
        self.leaving = False
        self.on_leaving: Callable[[ServerSession], None] | None = None
        self.push_key = secrets.token_bytes(PUSH_KEY_BYTES) if remote.push else b""
        self._codec, self._patience = remote.codec, remote.patience
        self._loop = asyncio.get_running_loop()
        self._rows = 0
        #: for the server's next step; and, once they were sent, until a step that brought them along is answered, the
        #: number under which the server does them once
        self._parents: list[int] | None = None
        self._reordering = 0
        self._infos: asyncio.Queue[pb.Info | None] = asyncio.Queue()
        self._waiting: dict[int, _Awaited] = {}
        self._last_sent = self._last_heard = self._loop.time()
        self._asked_for_life: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._stream = stream
        self._number = stream.attach(self)

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
        request_id: str = "",
        resumes: bool = False,
        on_queue: QueueCallback | None = None,
    ) -> ServerSession:
        """Ask the server for a session, wait in its queue as long as `patience.queue` allows.

        :param request_id: for the server's log
        :param resumes: it is fed what another server was, to take its place or to check it

        Raises `Unreachable`, `Busy` with the expected wait, or whatever reason the server has to refuse.
        """
        question = pb.Open(
            model=remote.name,
            start=hop.start,
            end=hop.end,
            max_length=max_length,
            rows=rows,
            bid=bid,
            adapter=remote.adapter,
            session_id=session_id,
            request_id=request_id,
            resumes=resumes,
            codec=remote.codec,
            prefix=prefix,
            no_queue=remote.patience.queue <= 0,
        )
        while True:
            stream, is_new = await remote.connection.session_stream(hop.peer_id, within=remote.patience.connect)
            session = cls(remote, hop, stream, max_length)
            question.push_key = session.push_key
            stream.post(session._number, pb.Message(open=question))
            session._tick()  # signs of life are due in a queue, too
            try:
                info = await session._await_place(on_queue)
                break
            except BaseException as e:
                await session.close()
                if is_new or stream.usable or not isinstance(e, Unreachable):
                    raise
                # the server had closed a stream that nobody used, before it heard of us
        session.cached_tokens = info.cached_tokens
        session.max_step_tokens = info.max_step_tokens or rows
        session.limit = info.max_length or max_length
        session._rows = rows if info.cached_tokens else 0
        return session

    async def _await_place(self, on_queue: QueueCallback | None) -> pb.Info:
        patience = self._patience
        info = await self._next_info(patience.open)
        if info is None:
            raise self._named(Unreachable(f"no answer within {patience.open:.0f} s", self.hop.peer_id))
        until = self._loop.time() + patience.queue
        while not info.accepted:
            if on_queue is not None:
                on_queue(self.hop, info)
            later = await self._next_info(until - self._loop.time())
            if later is None:
                text = f"still {info.queue_length} sessions before this one after {patience.queue:.0f} s"
                raise self._named(Busy(text, info.start_seconds or None, info.queue_length))
            info = later
        return info

    async def _next_info(self, within: float) -> pb.Info | None:
        """What the server says next, or None if it says nothing within so many seconds."""
        try:
            async with asyncio.timeout(max(within, 0)):
                info = await self._infos.get()
        except TimeoutError:
            return None
        if info is None:
            assert self.broken is not None
            raise self.broken
        return info

    def reorder(self, parents: Sequence[int]) -> None:
        """Before the next step, new row i continues old row `parents[i]`."""
        if self._reordering:
            self._stream.post(self._number, pb.Message(close=pb.Close()))
            self.lost(SessionExpired("after a step that failed, nobody knows the order of its rows"))
        self._parents = [self._parents[p] for p in parents] if self._parents is not None else list(parents)

    @property
    def pending(self) -> tuple[int, list[int] | None, int]:
        """What the next step will tell the server about its rows; equal where one message can tell several servers."""
        return self._rows, self._parents, self._reordering

    def send(
        self,
        hidden: torch.Tensor,
        answer: Answer,
        *,
        step_id: int,
        position: int,
        tensors: Mapping[str, torch.Tensor] | None = None,
        hashes: bytes = b"",
        max_length: int = 0,
        request_id: str = "",
        route: Sequence[pb.Next] = (),
    ) -> None:
        """Send `hidden` `[rows, tokens, hidden]` for the places from `position` on. The session must not be broken.

        :param answer: resolves to what comes of it
        :param step_id: higher than that of any step before
        :param tensors: mask, position_ids, prompts, as in `lilliput.proto`
        :param hashes: keys of the grains that the step completes
        :param max_length: ask for a longer session first
        :param route: the outputs are pushed through these servers' sessions, which `expect` them
        """
        self.expect(answer, step_id=step_id, rows=hidden.shape[0], position=position)
        message = pb.Message(
            step=pb.Step(
                step_id=step_id,
                start_position=position,
                parents=self._parents,
                reordering=self._reordering,
                hashes=hashes,
                max_length=max_length,
                request_id=request_id,
                route=route,
            )
        )
        self._last_sent = self._loop.time()
        self._stream.post(
            self._number, message, {"hidden": hidden, **tensors} if tensors else {"hidden": hidden}, codec=self._codec
        )
        size = self._waiting[step_id].nbytes = sum(header.nbytes for header in message.tensors)
        self.stats.bytes_sent += size
        self._stream.unanswered_bytes += size

    def expect(self, answer: Answer, *, step_id: int, rows: int, position: int) -> None:
        """Another server will push a step into this session; if that fails here, the answer says so."""
        if self._rows == 0 or position == 0:  # nothing there to be reordered
            self._parents, self._reordering = None, 0
        elif rows != self._rows and (self._parents is None or self._reordering):
            self._parents, self._reordering = [min(row, self._rows - 1) for row in range(rows)], 0
        if self._parents is not None and not self._reordering:
            self._reordering = step_id
        self._rows = rows
        self._waiting[step_id] = _Awaited(answer, self._loop.time() + self._patience.step)

    def forget(self, step_id: int) -> _Awaited | None:
        """Nobody waits for this step any more."""
        awaited = self._waiting.pop(step_id, None)
        if awaited is not None:
            self._stream.unanswered_bytes -= awaited.nbytes
        return awaited

    def saw(self, step_id: int, timing: pb.Timing) -> None:
        """The server has computed a step and pushed it on."""
        self._last_heard = self._loop.time()
        self._count(step_id, timing)

    async def drain(self) -> None:
        """Wait while much is still to be sent to this server."""
        with contextlib.suppress(Unreachable):  # the stream tells its sessions
            await self._stream.drain()

    async def close(self) -> None:
        """Say goodbye. May be called twice, and when the session is broken."""
        if self.broken is None:
            self._stream.post(self._number, pb.Message(close=pb.Close()))
            self.lost(Unreachable("the session was closed", self.hop.peer_id))

    # -- what comes back

    def take(self, received: Received) -> None:
        """A message for this session."""
        self._last_heard = self._loop.time()
        self._asked_for_life = None
        if received.kind == "output":
            self._take_output(received)
        elif received.kind == "error":
            self._take_error(received.body)  # type: ignore[arg-type]
        elif received.kind == "info":
            self._infos.put_nowait(received.body)  # type: ignore[arg-type]
        elif received.kind == "leaving":
            self.leaving = True
            if self.on_leaving is not None:
                self.on_leaving(self)

    def _take_output(self, received: Received) -> None:
        body: pb.Output = received.body  # type: ignore[assignment]
        hidden = received.tensors.get("hidden")
        if hidden is None:
            self.lost(Unreachable("an output without hidden states", self.hop.peer_id))
            return
        self.stats.bytes_received += hidden.numel() * hidden.element_size()
        self._count(body.step_id, body)
        self._answer(body.step_id, Reply(self, hidden, before=body.before, own=body))

    def _count(self, step_id: int, timing: pb.Timing | pb.Output) -> None:
        stats = self.stats
        stats.steps += 1
        stats.computed_tokens += timing.computed_tokens
        stats.queued_ms += timing.queued_ms
        stats.compute_ms += timing.compute_ms
        if timing.max_length:
            self.max_length = timing.max_length
        if step_id >= self._reordering > 0:
            self._parents, self._reordering = None, 0

    def _answer(self, step_id: int, reply: Reply) -> None:
        awaited = self.forget(step_id)
        if awaited is not None and not awaited.answer.done():
            awaited.answer.set_result(reply)

    def _take_error(self, body: pb.Error) -> None:
        error = self._named(error_of(body))
        if body.closed:
            self.lost(error)
            return
        self._answer(body.step_id, Reply(self, error=error))

    def lost(self, why: LilliputError) -> None:
        """The session is over: whoever waits for something hears why, and so does whoever asks later."""
        if self.broken is None:
            self.broken = self._named(why)
            self._infos.put_nowait(None)
            self._stream.detach(self._number)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for step_id in list(self._waiting):
            self._answer(step_id, Reply(self, error=self.broken))

    def _named(self, error: LilliputError) -> LilliputError:
        """The same error, with the server and its blocks in its text."""
        if not str(error).startswith(prefix := f"server {self.hop}: "):
            error.args = (f"{prefix}{error}", *error.args[1:])
        return error

    # -- signs of life

    def _tick(self) -> None:
        """Ping when nothing else was sent for long, or a step waits; give up when nothing comes back."""
        self._timer = self._loop.call_later(_TICK_SECONDS, self._tick)
        now, heard = self._loop.time(), max(self._last_heard, self._stream.heard)
        if self._asked_for_life is not None:
            if heard > self._asked_for_life:
                self._asked_for_life = None
            elif now - self._asked_for_life > self._patience.silence + self._stream.excused_seconds:
                return self._give_up(f"no sign of life for {now - heard:.0f} s")
        if any(awaited.deadline < now for awaited in self._waiting.values()):
            return self._give_up(f"no output within {self._patience.step:.0f} s")
        quiet = now - max(self._last_heard, self._last_sent)
        if quiet >= (_TICK_SECONDS if self._waiting else _PING_SECONDS - _TICK_SECONDS):
            if self._asked_for_life is None:
                self._asked_for_life = now
            self._last_sent = now
            self._stream.post(self._number, pb.Message(ping=pb.Ping(id=1)))
        return None

    def _give_up(self, why: str) -> None:
        self._stream.post(self._number, pb.Message(close=pb.Close()))
        self.lost(Unreachable(why, self.hop.peer_id))
