"""`rpc_forward_incremental`: one stream from a client, with any number of its sessions.

Sessions of one client share a stream because their steps come and go together: what is read in one turn of the loop is
handed to the engine at once and runs in one pass, and the outputs leave in one write.
"""

from __future__ import annotations

import asyncio
import logging

import torch

from lilliput.engine.session import CacheSession, Step
from lilliput.errors import BadRequest, Busy, LilliputError, ServerFailure
from lilliput.server.served_session import ServedSession
from lilliput.server.service import Service
from lilliput.wire import lilliput_pb2 as pb
from lilliput.wire.channel import Channel, Received, error_message
from lilliput.wire.limits import DEFAULT_LIMITS
from lilliput.wire.request_id import is_request_id

logger = logging.getLogger(__name__)

#: steps under way, for each session of the stream; past that the stream is not read
_IN_FLIGHT_PER_SESSION = 8
#: and past so many bytes of their tensors, in all streams of the peer
_IN_FLIGHT_BYTES = DEFAULT_LIMITS.max_payload_bytes
#: a stream with so many sessions gets no more: open another one
_MAX_SESSIONS = 1024


class ClientStream:
    """Serves one stream from its first message to its end.

    :ivar peer: the client's peer id, authenticated by libp2p
    :ivar ended: done when the stream has ended
    """

    def __init__(self, service: Service, channel: Channel, peer: str) -> None:
        self.service, self.channel, self.peer = service, channel, peer
        self.loop = asyncio.get_running_loop()
        self._in_flight = 0
        self._load = service.load_of(peer)
        self._sessions: dict[int, ServedSession] = {}
        self._arrived: list[tuple[CacheSession, Step]] = []
        self._closing = asyncio.Event()
        self._used = self._ending = False
        self._empty_since = self.loop.time()
        self.ended: asyncio.Future[None] = self.loop.create_future()

    async def run(self) -> None:
        """Until the client closes the stream or disappears, or its only session ends."""
        reading = self.loop.create_task(self._read())
        closing = self.loop.create_task(self._closing.wait())
        # a stream must begin with an open message, and an empty one is not kept for ever
        idle = self.loop.create_task(self._watch())
        self.service.streams.add(self)
        try:
            await asyncio.wait({reading, closing}, return_when=asyncio.FIRST_COMPLETED)
            if reading.done() and (error := reading.exception()) is not None:
                if not isinstance(error, LilliputError):
                    logger.error("a stream from %s failed", self.peer, exc_info=error)
                    error = ServerFailure(f"the server could not go on with this stream: {error}")
                self.end(error)  # not a message: nothing that follows can be understood
            if self._ending:  # it may be sending, and should still read why
                reading.cancel()
                await asyncio.wait({reading})
                await self.channel.hear_out()
        finally:
            for task in (reading, closing, idle):
                task.cancel()
            for session in list(self._sessions.values()):
                session.release()
            self.service.streams.discard(self)
            await asyncio.gather(reading, closing, idle, return_exceptions=True)
            self.ended.set_result(None)

    def end(self, why: LilliputError) -> None:
        """Tell every session why it ends, and close the stream."""
        for session in list(self._sessions.values()):
            session.end(why)
        if not self._ending:
            self.channel.post(error_message(why, closed=True))
        self._ending = True
        self._closing.set()

    def tell_leaving(self, within: float) -> None:
        """Tell every session that the server leaves in so many seconds; those in the queue have nothing to wait for."""
        for session in list(self._sessions.values()):
            session.tell_leaving(within)

    # ---- for its sessions ----

    def post(self, number: int, message: pb.Message, hidden: torch.Tensor | None = None, codec: str = "none") -> None:
        message.session = number
        self.channel.post(message, {"hidden": hidden} if hidden is not None else None, codec=codec)

    def last_word(self, number: int, message: pb.Message) -> None:
        """Tell why a session ends; if it has the stream to itself, that ends, too."""
        self.post(number, message)
        self._ending = self._ending or number == 0

    def submit(self, session: CacheSession, step: Step) -> None:
        """Hand a step to the engine, with all others that are read in this turn of the loop."""
        if not self._arrived:
            self.loop.call_soon(self._submit_arrived)
        self._arrived.append((session, step))

    def took(self, size: int) -> None:
        """A step of so many bytes came from the client."""
        self._in_flight += 1
        self._load.step_bytes += size

    def answered(self, size: int) -> None:
        self._in_flight -= 1
        self._load.step_bytes -= size
        self._load.room.set()

    def forget(self, number: int) -> None:
        """A session has ended."""
        self._sessions.pop(number, None)
        self._empty_since = self.loop.time()
        if number == 0:
            self._closing.set()

    # ---- reading ----

    async def _read(self) -> None:
        while (received := await self.channel.receive()) is not None:
            if self._closing.is_set():
                return  # too late
            self._take(received)
            if self.channel.congested:  # a client that does not read is not read either
                self._submit_arrived()
                await self.channel.drain()
            while not self._has_room():
                self._load.room.clear()
                self._submit_arrived()
                await self._load.room.wait()

    def _has_room(self) -> bool:
        steps = _IN_FLIGHT_PER_SESSION * max(1, len(self._sessions))
        # however much its other streams have sent, each goes on with one step
        return self._in_flight < steps and (self._load.step_bytes < _IN_FLIGHT_BYTES or not self._in_flight)

    def _take(self, received: Received) -> None:
        number = received.session
        session = self._sessions.get(number)
        if session is not None:
            session.take(received)
            return
        try:
            if received.kind != "open":
                raise BadRequest(f"a session begins with an open message, not with a {received.kind!r}")
            if len(self._sessions) >= _MAX_SESSIONS:
                raise Busy(f"{_MAX_SESSIONS} sessions on one stream; open another")
            session = ServedSession(self, number, received.body)  # type: ignore[arg-type]
        except LilliputError as e:
            logger.info("a session of %s was refused: %s", self.peer[-8:], e, extra=_about(received, self.peer))
            if received.kind in ("open", "step") or number == 0:  # others may be late for a session that has ended
                self.channel.post(error_message(e, closed=True, session=number))
            if number == 0:
                self._ending = True
                self._closing.set()
            return
        self._sessions[number] = session
        self._used = True
        session.ask_for_place()

    def _submit_arrived(self) -> None:
        arrived, self._arrived = self._arrived, []
        if arrived:
            self.service.engine.submit_all(arrived)

    async def _watch(self) -> None:
        """End the stream when it has been without a session for too long."""
        while True:
            limit = self.service.idle_seconds if self._used else self.service.first_step_seconds
            left = limit if self._sessions else self._empty_since + limit - self.loop.time()
            if left <= 0:
                break
            await asyncio.sleep(left)
        if self._used:
            self._closing.set()
        else:
            self.end(BadRequest("no open message came"))


def _about(received: Received, peer: str) -> dict[str, str]:
    """What a line of the log says about an open message that was refused."""
    request_id = getattr(received.body, "request_id", "")
    return {"peer": peer, "request_id": request_id if is_request_id(request_id) else ""}
