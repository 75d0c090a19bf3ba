"""`rpc_forward_incremental`: one session over one stream.

    Open -> Info (in the queue: an Info at every change of place, the last one accepts) -> Step -> Output ... -> Close

One task reads, one writes; the engine computes in between. When the stream ends, by whatever cause, the session's pages
are given back.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import torch

from lilliput.engine.session import CacheSession, Step, StepOutput
from lilliput.errors import BadRequest, Busy, CacheFull, LilliputError, SessionExpired
from lilliput.server.admission import Ticket
from lilliput.server.service import Service
from lilliput.wire import lilliput_pb2 as pb
from lilliput.wire.channel import Channel, Received, error_message
from lilliput.wire.prefix import GRAIN, KEY_BYTES
from lilliput.wire.tensors import check_codec

#: steps of one session that may be under way; past that its stream is not read
_MAX_IN_FLIGHT = 8
#: a farewell may take this long to be sent (seconds)
_FLUSH_SECONDS = 1.0
_MAX_ROWS = 1024

_Outgoing = tuple[pb.Message, torch.Tensor | None]


class SessionStream:
    """Serves one stream from its first message to its end."""

    def __init__(self, service: Service, channel: Channel, peer: str) -> None:
        self._service, self._channel, self._peer = service, channel, peer
        self._loop = asyncio.get_running_loop()
        self._outbox: asyncio.Queue[_Outgoing | None] = asyncio.Queue()
        self._ticket: Ticket | None = None
        self._open: pb.Open | None = None
        self._session: CacheSession | None = None
        self._codec = "none"
        self._in_flight = 0
        self._room = asyncio.Event()
        self._stepped = False
        self._peer_gone = False
        self._heard = self._loop.time()
        self._opened = time.monotonic()
        self._accepting: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Until the client closes, disappears, falls silent, or errs beyond repair."""
        self._service.endings.add(self._end)
        watch, writer, reader = (self._loop.create_task(c) for c in (self._watch(), self._write(), self._read()))
        try:
            await asyncio.wait({reader, writer}, return_when=asyncio.FIRST_COMPLETED)
            if reader.done():
                error = reader.exception()
                if isinstance(error, LilliputError):
                    self._send(error_message(error, closed=True))
                elif error is not None:
                    raise error
                if not self._peer_gone:
                    self._outbox.put_nowait(None)
                    await asyncio.wait({writer}, timeout=_FLUSH_SECONDS)
        finally:
            self._service.endings.discard(self._end)
            for task in (watch, reader, writer):
                task.cancel()
            await asyncio.gather(watch, reader, writer, return_exceptions=True)
            await self._release()

    # ---- reading ----

    async def _read(self) -> None:
        first = await self._channel.receive()
        if first is None:
            self._peer_gone = True
            return
        if first.kind != "open":
            raise BadRequest(f"a session begins with an open message, not with a {first.kind!r}")
        self._ask_for_place(first.body)
        while (received := await self._channel.receive()) is not None:
            self._heard = self._loop.time()
            if received.kind == "step":
                while self._in_flight >= _MAX_IN_FLIGHT:
                    self._room.clear()
                    await self._room.wait()
                try:
                    await self._step(received)
                except LilliputError as e:
                    self._send(error_message(e, step_id=received.body.step_id))  # type: ignore[attr-defined]
            elif received.kind == "ping":
                self._send(pb.Message(pong=pb.Pong(id=received.body.id)))  # type: ignore[attr-defined]
            elif received.kind == "close":
                return
            else:
                self._send(error_message(BadRequest(f"a {received.kind!r} message makes no sense inside a session")))
        self._peer_gone = True

    def _ask_for_place(self, body: Any) -> None:
        service = self._service
        service.check_blocks(body.model, body.start, body.end)
        if not 0 < body.rows <= _MAX_ROWS:
            raise BadRequest(f"a session has 1 to {_MAX_ROWS} rows, not {body.rows}")
        if body.max_length < 1:
            raise BadRequest("max_length must be at least 1 token")
        if body.bid != body.bid:
            raise BadRequest("the bid is not a number")
        if body.adapter:
            raise BadRequest(f"this server has no adapter {body.adapter!r}")
        if len(body.prefix) % (KEY_BYTES * body.rows):
            raise BadRequest(f"the prefix keys are not {body.rows} equal lists of {KEY_BYTES}-byte keys")
        self._codec = check_codec(body.codec)
        pages = service.admission.pages_for(body.rows, body.max_length)
        self._open = body
        self._ticket = service.admission.ask(pages, bid=body.bid, peer=self._peer, changed=self._place_changed)
        if not self._ticket.granted and body.no_queue:
            length = self._ticket.queue_length
            service.admission.leave(self._ticket)
            raise Busy("this server is full", wait_seconds=service.expected_wait(length), queue_length=length)
        self._place_changed()

    def _place_changed(self) -> None:
        if self._ticket is None:
            return
        if self._ticket.granted:
            self._accepting = self._loop.create_task(self._accept())
        else:
            self._send(pb.Message(info=self._info(accepted=False)))

    async def _accept(self) -> None:
        body = self._open
        assert body is not None
        keys = [body.prefix[i : i + KEY_BYTES] for i in range(0, len(body.prefix), KEY_BYTES)]
        each = len(keys) // body.rows
        opening = self._service.engine.open(
            body.start,
            body.end,
            rows=body.rows,
            max_length=body.max_length,
            bid=body.bid,
            owner=b"" if self._service.share_prefixes else self._peer.encode(),
            prefix=[keys[i : i + each] for i in range(0, len(keys), each)] if each else None,
        )
        self._session = await asyncio.shield(asyncio.wrap_future(opening))
        self._heard = self._loop.time()
        info = self._info(accepted=True)
        info.cached_tokens = self._session.length
        self._send(pb.Message(info=info))

    def _info(self, *, accepted: bool) -> pb.Info:
        service, ticket = self._service, self._ticket
        assert ticket is not None
        return pb.Info(
            accepted=accepted,
            queue_length=ticket.queue_length,
            start_seconds=0.0 if accepted else service.expected_wait(ticket.queue_length),
            tokens_per_second=service.engine.rates.session_tokens_per_second,
            max_length=service.admission.max_length,
            max_step_tokens=service.max_step_tokens,
        )

    async def _step(self, received: Received) -> None:
        body: Any = received.body
        session, service = self._session, self._service
        if session is None:
            raise BadRequest("this session has not been accepted yet; wait for the info message that says so")
        hidden = received.tensors.get("hidden")
        if hidden is None:
            raise BadRequest("a step needs the tensor 'hidden' [rows, tokens, hidden]")
        if hidden.dim() == 3 and hidden.shape[0] * hidden.shape[1] > service.max_step_tokens:
            raise BadRequest(
                f"{hidden.shape[0]} rows x {hidden.shape[1]} tokens in one step; "
                f"at most {service.max_step_tokens}: send them in several steps"
            )
        unknown = set(received.tensors) - {"hidden", "mask", "position_ids", "prompts"}
        if unknown:
            raise BadRequest(f"a step has no tensors named {', '.join(sorted(unknown))}")
        if body.max_length > session.max_length:
            await self._extend(session, body.max_length)
        step_id = body.step_id
        self._stepped = True
        self._in_flight += 1

        def done(result: StepOutput | LilliputError) -> None:
            with contextlib.suppress(RuntimeError):  # the loop may be gone when the server stops
                self._loop.call_soon_threadsafe(self._deliver, step_id, result)

        service.engine.submit(
            session,
            Step(
                hidden,
                step_id=step_id,
                start_position=body.start_position if body.HasField("start_position") else None,
                parents=list(body.parents) or None,
                mask=received.tensors.get("mask"),
                position_ids=received.tensors.get("position_ids"),
                prompts=received.tensors.get("prompts"),
                hashes=_split_keys(body.hashes, hidden.shape[0]) if body.hashes else None,
                done=done,
            ),
        )

    async def _extend(self, session: CacheSession, max_length: int) -> None:
        service, ticket = self._service, self._ticket
        assert ticket is not None
        pages = service.admission.pages_for(session.max_rows, max_length)
        if not service.admission.extend(ticket, pages):
            raise CacheFull(
                f"there is no room now to extend the session from {session.max_length} to {max_length} tokens per row"
            )
        await asyncio.wrap_future(service.engine.extend(session, max_length))

    # ---- writing ----

    def _send(self, message: pb.Message, hidden: torch.Tensor | None = None) -> None:
        self._outbox.put_nowait((message, hidden))

    def _deliver(self, step_id: int, result: StepOutput | LilliputError) -> None:
        self._heard = self._loop.time()
        if isinstance(result, LilliputError):
            self._in_flight -= 1
            self._room.set()
            self._send(error_message(result, step_id=step_id))
            return
        output = pb.Output(
            step_id=step_id,
            length=result.length,
            queued_ms=result.queued_seconds * 1e3,
            compute_ms=result.compute_seconds * 1e3,
            computed_tokens=result.computed_tokens,
            max_length=self._session.max_length if self._session is not None else 0,
        )
        self._send(pb.Message(output=output), result.hidden)

    async def _write(self) -> None:
        while (outgoing := await self._outbox.get()) is not None:
            message, hidden = outgoing
            if hidden is None:
                await self._channel.send(message)
            else:
                await self._channel.send(message, {"hidden": hidden}, codec=self._codec)
                self._in_flight -= 1
                self._room.set()

    # ---- ending ----

    async def _watch(self) -> None:
        """Close the session when nothing comes from the client for too long."""
        service = self._service
        while True:
            waiting_for_first = self._session is not None and not self._stepped
            limit = service.first_step_seconds if waiting_for_first or self._open is None else service.idle_seconds
            silent = self._loop.time() - self._heard
            if silent >= limit and not self._in_flight:
                what = "no first step" if waiting_for_first else "nothing"
                self._end(SessionExpired(f"the session was closed: {what} came for {limit:g} s"))
                return
            await asyncio.sleep(max(0.02, limit - silent) if not self._in_flight else limit)

    def _end(self, why: LilliputError) -> None:
        self._send(error_message(why, closed=True))
        self._outbox.put_nowait(None)

    async def _release(self) -> None:
        if self._accepting is not None:
            await asyncio.wait({self._accepting})
        if self._session is not None:
            session, self._session = self._session, None
            await asyncio.shield(asyncio.wrap_future(self._service.engine.close(session)))
            self._service.saw_session(self._opened)
        if self._ticket is not None:
            self._service.admission.leave(self._ticket)


def _split_keys(data: bytes, rows: int) -> list[list[bytes]]:
    if len(data) % (KEY_BYTES * rows):
        raise BadRequest(f"the step's page keys are not {rows} equal lists of {KEY_BYTES}-byte keys ({GRAIN} tokens each)")
    keys = [data[i : i + KEY_BYTES] for i in range(0, len(data), KEY_BYTES)]
    each = len(keys) // rows
    return [keys[i : i + each] for i in range(0, len(keys), each)]
