"""One session as its server sees it: its place, its cache, its silence, its end.

    Open -> Info (in the queue: an Info at every change of place, the last one accepts) -> Step -> Output ... -> Close

Everything here runs on the server's loop, in callbacks that never wait; the engine computes in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch

from lilliput.engine.session import CacheSession, Step, StepOutput
from lilliput.errors import BadRequest, Busy, CacheFull, Draining, LilliputError, ServerFailure, SessionExpired
from lilliput.server.admission import Ticket
from lilliput.server.arrived import Arrived, split_keys
from lilliput.server.session_log import SessionLog
from lilliput.wire import lilliput_pb2 as pb
from lilliput.wire.channel import Received, error_message
from lilliput.wire.limits import DEFAULT_LIMITS, PUSH_KEY_BYTES
from lilliput.wire.tensors import check_codec

if TYPE_CHECKING:
    from lilliput.server.client_stream import ClientStream

_MAX_ROWS = 1024
_TENSORS = {"hidden", "mask", "position_ids", "prompts"}
#: steps that may wait or be computed in a session that is pushed to, and bytes of their tensors
_PUSHED_AT_ONCE = 16
_PUSHED_BYTES = DEFAULT_LIMITS.max_payload_bytes
_MAX_ROUTE = 256


class ServedSession:
    """A session from its open message on. Raises what is wrong with that.

    :param number: which of the stream's sessions it is
    """

    def __init__(self, stream: ClientStream, number: int, body: pb.Open) -> None:
        service = stream.service
        self._log = SessionLog(body, stream.peer)
        service.check_blocks(body.model, body.start, body.end)
        if not 0 < body.rows <= _MAX_ROWS:
            raise BadRequest(f"a session has 1 to {_MAX_ROWS} rows, not {body.rows}")
        if body.max_length < 1:
            raise BadRequest("max_length must be at least 1 token")
        if body.bid != body.bid:
            raise BadRequest("the bid is not a number")
        service.span.check_adapter(body.adapter)
        self._prefix = split_keys(body.prefix, body.rows)
        if body.push_key and (len(body.push_key) != PUSH_KEY_BYTES or body.push_key in service.pushed_sessions):
            raise BadRequest(f"a push key is {PUSH_KEY_BYTES} random bytes of this session alone")
        self._codec = check_codec(body.codec)
        self._pages = service.pages_for(body.start, body.end, body.rows, body.max_length)
        self._service, self._stream, self._number, self._body = service, stream, number, body
        self._ticket: Ticket | None = None
        self._session: CacheSession | None = None
        self._opening: Future[CacheSession] | None = None
        self._in_flight = self._pushed = self._pushed_bytes = 0
        self._highest_id = 0
        self._stepped = self._ended = False
        self._opened = time.monotonic()
        self._accepted_at = self._heard = stream.loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._unsent = 0

    # ---- its place ----

    def ask_for_place(self) -> None:
        """Enter the queue, or start at once."""
        admission, body = self._service.admission, self._body
        if body.push_key:
            self._service.pushed_sessions[body.push_key] = self
        self._watch()
        try:
            ticket = admission.ask(
                self._pages,
                bid=body.bid,
                peer=self._stream.peer,
                changed=self._place_changed,
                evict=self._make_room,
                queue=not body.no_queue,
            )
        except LilliputError as e:
            if isinstance(e, Busy) and e.queue_length and e.wait_seconds is None:
                e.wait_seconds = self._service.expected_wait(e.queue_length)
            self.end(e)
            return
        self._ticket = ticket
        self._place_changed()

    def _place_changed(self) -> None:
        ticket = self._ticket
        if ticket is None or self._ended:
            return
        if not ticket.granted:
            self._service.watch_queue()
            if self._body.no_queue:  # whoever is in the way is leaving already
                return
            self._post(pb.Message(info=self._info(accepted=False)))
            return
        body = self._body
        self._opening = self._service.engine.open(
            body.start,
            body.end,
            rows=body.rows,
            max_length=body.max_length,
            bid=body.bid,
            owner=b"" if self._service.share_prefixes else self._stream.peer.encode(),
            adapter=body.adapter,
            peer=self._stream.peer,
            prefix=self._prefix or None,
        )
        self._opening.add_done_callback(lambda opening: self._soon(self._accepted, opening))

    def _make_room(self) -> None:
        """Others wait, and this peer has more than its share."""
        wait = self._service.expected_wait(1)
        self.end(Busy("others wait for room here, and you have more than an equal share of it", wait, 1))

    def _accepted(self, opening: Future[CacheSession]) -> None:
        if self._ended:
            return  # `release` closes it
        self._session = opening.result()
        self._accepted_at = self._heard = self._stream.loop.time()
        self._watch()
        info = self._info(accepted=True)
        info.cached_tokens = self._session.length
        self._post(pb.Message(info=info))
        self._log.opened(info.cached_tokens)

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

    # ---- its messages ----

    def take(self, received: Received) -> None:
        """A message from the client."""
        self._heard = self._stream.loop.time()
        body: Any = received.body
        if received.kind == "step":
            self._take_step(Arrived(body, received.tensors))
        elif received.kind == "ping":
            self._post(pb.Message(pong=pb.Pong(id=body.id)))
        elif received.kind == "close":
            self.release()
        else:
            self._post(error_message(BadRequest(f"a {received.kind!r} message makes no sense inside a session")))

    def take_push(self, body: pb.Push, tensors: Mapping[str, torch.Tensor]) -> None:
        """A step that another server has pushed here. If something is wrong with it, the client hears of it."""
        self._heard = self._stream.loop.time()
        self._take_step(Arrived(body.step, tensors, pushed=True, before=body.before))

    def _take_step(self, arrived: Arrived) -> None:
        try:
            self._step(arrived)
        except LilliputError as e:
            self._fail(arrived, e)
        except Exception as e:  # one client's step must not end another's session
            self._log.exception("a step could not be taken")
            self._fail(arrived, ServerFailure(f"the step could not be taken: {e}"))

    def _fail(self, arrived: Arrived, why: LilliputError) -> None:
        self._log.failed(arrived.body.step_id, why)
        self._post(error_message(why, step_id=arrived.body.step_id))

    def _step(self, arrived: Arrived) -> None:
        body, tensors = arrived.body, arrived.tensors
        session, service = self._session, self._service
        self._log.serves(body.request_id)
        if session is None:
            raise BadRequest("this session has not been accepted yet; wait for the info message that says so")
        hidden = tensors.get("hidden")
        if hidden is None:
            raise BadRequest("a step needs the tensor 'hidden' [rows, tokens, hidden]")
        if hidden.dim() != 3 or 0 in hidden.shape:
            raise BadRequest(f"hidden states must be [rows, tokens, hidden], not {list(hidden.shape)}")
        if hidden.shape[0] * hidden.shape[1] > service.max_step_tokens:
            raise BadRequest(
                f"{hidden.shape[0]} rows x {hidden.shape[1]} tokens in one step; "
                f"at most {service.max_step_tokens}: send them in several steps"
            )
        if unknown := set(tensors) - _TENSORS:
            raise BadRequest(f"a step has no tensors named {', '.join(sorted(unknown))}")
        if body.route and ("prompts" in tensors or len(body.route) > _MAX_ROUTE):
            raise BadRequest(f"a step is pushed without prompts, through at most {_MAX_ROUTE} servers")
        if self._body.push_key:
            self._check_order(arrived)
        self._highest_id = max(self._highest_id, body.step_id)
        if body.max_length > session.max_length:
            self._extend(session, body.max_length)
        self._stepped = True
        assert self._ticket is not None
        self._ticket.used_at = service.admission.clock()
        self._count(arrived, 1)
        self._stream.submit(
            session,
            Step(
                hidden,
                step_id=body.step_id,
                start_position=body.start_position if body.HasField("start_position") else None,
                parents=list(body.parents) or None,
                reordering=body.reordering,
                mask=tensors.get("mask"),
                position_ids=tensors.get("position_ids"),
                prompts=tensors.get("prompts"),
                hashes=split_keys(body.hashes, hidden.shape[0]) or None,
                done=lambda result: self._soon(self._deliver, arrived, result),
            ),
        )

    def _check_order(self, arrived: Arrived) -> None:
        """Steps come from several sides. Their ids rise; what is late must not roll back what has moved on."""
        if arrived.body.step_id < self._highest_id:
            raise ServerFailure(f"step {self._highest_id} has come before step {arrived.body.step_id}")
        if not arrived.pushed:
            return
        if self._pushed >= _PUSHED_AT_ONCE or self._pushed_bytes + arrived.nbytes > _PUSHED_BYTES:
            raise Busy(f"{self._pushed} steps were pushed into this session and are not computed yet")

    def _count(self, arrived: Arrived, sign: int) -> None:
        """A step is under way (1), or is not any more (-1)."""
        self._in_flight += sign
        if arrived.pushed:
            self._pushed += sign
            self._pushed_bytes += sign * arrived.nbytes
        elif sign > 0:
            self._stream.took(arrived.nbytes)
        else:
            self._stream.answered(arrived.nbytes)

    def _extend(self, session: CacheSession, max_length: int) -> None:
        service, ticket = self._service, self._ticket
        assert ticket is not None
        pages = service.pages_for(session.start, session.end, session.max_rows, max_length)
        if not service.admission.extend(ticket, pages):
            raise CacheFull(
                f"there is no room now to extend the session from {session.max_length} to {max_length} tokens per row"
            )
        service.engine.extend(session, max_length)  # before the step that follows, the engine keeps the order

    def _deliver(self, arrived: Arrived, result: StepOutput | LilliputError) -> None:
        self._count(arrived, -1)
        self._heard = self._stream.loop.time()
        if self._ended:
            return
        if isinstance(result, SessionExpired):  # its cache is not what the client needs any more
            self.end(result)
        elif isinstance(result, LilliputError):
            self._fail(arrived, result)
        else:
            self._log.computed(result)
            (self._push if arrived.body.route else self._answer)(arrived, result)

    def _answer(self, arrived: Arrived, result: StepOutput, *, unpushed: bool = False) -> None:
        """Send the outputs to the client."""
        if self._ended:
            return
        timing = self._timing(arrived, result)
        output = pb.Output(
            step_id=arrived.body.step_id,
            length=result.length,
            queued_ms=timing.queued_ms,
            compute_ms=timing.compute_ms,
            computed_tokens=timing.computed_tokens,
            max_length=timing.max_length,
            before=arrived.before,
            unpushed=unpushed,
        )
        self._stream.post(self._number, pb.Message(output=output), result.hidden, self._codec)

    def _push(self, arrived: Arrived, result: StepOutput) -> None:
        """Send the outputs to the next server's session; if it cannot be reached, to the client after all."""
        pushes = self._service.pushes
        assert pushes is not None
        following, *rest = arrived.body.route
        step = pb.Step()
        step.CopyFrom(arrived.body)
        del step.route[:]
        step.route.extend(rest)
        stream, timing = pushes.to(following.peer), self._timing(arrived, result)
        timing.there_and_back_ms = stream.there_and_back * 1e3
        body = pb.Push(push_key=following.push_key, step=step, before=[*arrived.before, timing])
        tensors = {**arrived.tensors, "hidden": result.hidden}
        stream.push(body, tensors, self._codec, failed=lambda: self._answer(arrived, result, unpushed=True))

    def _timing(self, arrived: Arrived, result: StepOutput) -> pb.Timing:
        return pb.Timing(
            queued_ms=max(time.perf_counter() - arrived.at - result.compute_seconds, 0.0) * 1e3,
            compute_ms=result.compute_seconds * 1e3,
            computed_tokens=result.computed_tokens,
            max_length=self._session.max_length if self._session is not None else 0,
        )

    # ---- its end ----

    def tell_leaving(self, within: float) -> None:
        """Tell the client that the server leaves in so many seconds."""
        if self._session is None:
            self.end(Draining("this server is about to leave and takes nothing new"))
        else:
            self._post(pb.Message(leaving=pb.Leaving(within_seconds=within)))

    def end(self, why: LilliputError) -> None:
        """Tell the client why the session ends, and end it."""
        if not self._ended:
            self._log.ended(why)
            self._stream.last_word(self._number, error_message(why, closed=True))
            self.release()

    def release(self) -> None:
        """Give the cache back; then whoever waits may have the place. May be called twice."""
        if self._ended:
            return
        self._ended = True
        self._log.closed()
        if self._timer is not None:
            self._timer.cancel()
        self._stream.forget(self._number)
        service, ticket = self._service, self._ticket
        if service.pushed_sessions.get(self._body.push_key) is self:
            del service.pushed_sessions[self._body.push_key]
        if ticket is None:
            return
        if self._opening is None:
            service.admission.leave(ticket)
            return

        def close(opening: Future[CacheSession]) -> None:
            # the place is free when the pages are
            service.engine.close(opening.result()).add_done_callback(
                lambda closing: self._soon(service.admission.leave, ticket)
            )

        self._opening.add_done_callback(close)
        service.saw_session(self._opened)

    def _watch(self) -> None:
        """End the session when nothing comes from the client for too long."""
        if self._timer is not None:
            self._timer.cancel()
        loop, service = self._stream.loop, self._service
        first = self._session is not None and not self._stepped
        limit = service.first_step_seconds if first else service.idle_seconds
        channel, unsent = self._stream.channel, self._unsent
        self._unsent = channel.unsent
        if channel.congested and self._unsent != unsent:  # it is not read meanwhile, but it reads
            self._heard = loop.time()
        silent = loop.time() - max(self._heard, channel.arriving)
        if first and not self._in_flight and loop.time() - self._accepted_at >= service.unused_seconds:
            self.end(
                SessionExpired(f"the session was closed: no first step in {service.unused_seconds:g} s, only pings")
            )
            return
        if silent >= limit and not self._in_flight:
            what = "no first step" if first else "nothing"
            self.end(SessionExpired(f"the session was closed: {what} came for {limit:g} s"))
            return
        self._timer = loop.call_later(max(0.02, limit - silent) if not self._in_flight else limit, self._watch)

    def _post(self, message: pb.Message) -> None:
        self._stream.post(self._number, message)

    def _soon(self, function: Any, *args: Any) -> None:
        """Call on the loop, from any thread. When the server stops, the loop may be gone."""
        with contextlib.suppress(RuntimeError):
            self._stream.loop.call_soon_threadsafe(function, *args)
