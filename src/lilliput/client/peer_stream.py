"""One stream to a server, which all of a client's sessions there share."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Protocol

import torch

from lilliput.errors import BadRequest, LilliputError, Unreachable
from lilliput.wire import lilliput_pb2 as pb
from lilliput.wire.channel import Channel, Received, error_of

#: a stream with so many sessions gets no more (servers take somewhat more)
MAX_SESSIONS = 512
#: what is on its way to a server, and as much back, holds up its signs of life: on a slow line it passes at this rate
_SLOW_BYTES_PER_SECOND = 64 << 10
#: but no server is excused for longer than this (seconds)
_MOST_EXCUSED_SECONDS = 60.0


class Receiver(Protocol):
    """A session, as its stream knows it."""

    def take(self, received: Received) -> None:
        """A message for this session."""

    def lost(self, why: LilliputError) -> None:
        """The stream has ended; nothing will come any more."""


class PeerStream:
    """Carries messages of many sessions, told apart by numbers.

    They share it because their steps come and go together: what is sent in one turn of the loop leaves in one write,
    and the server runs it in one pass.

    :ivar unanswered_bytes: of the steps that its sessions have sent
    """

    def __init__(self, channel: Channel, peer_id: str) -> None:
        self.peer_id = peer_id
        self._channel = channel
        self._sessions: dict[int, Receiver] = {}
        self._last_number = 0
        self.unanswered_bytes = 0
        self._loop = asyncio.get_running_loop()
        self._heard = self._loop.time()
        self._closed = False
        self._reader = self._loop.create_task(self._read())

    @property
    def usable(self) -> bool:
        """Whether a new session may join."""
        return not self._closed and len(self._sessions) < MAX_SESSIONS

    @property
    def heard(self) -> float:
        """When something came last (the loop's time), were it for another session or a piece of a long message."""
        return max(self._heard, self._channel.arriving)

    @property
    def excused_seconds(self) -> float:
        """So much longer than usual a sign of life may take, for all that is on its way."""
        return min(2 * self.unanswered_bytes / _SLOW_BYTES_PER_SECOND, _MOST_EXCUSED_SECONDS)

    def attach(self, session: Receiver) -> int:
        """Give a session its number."""
        if self._closed:
            raise Unreachable("the connection broke", self.peer_id)
        self._last_number += 1
        self._sessions[self._last_number] = session
        return self._last_number

    def detach(self, number: int) -> None:
        """Nothing more is handed to this session."""
        self._sessions.pop(number, None)

    def post(
        self,
        number: int,
        message: pb.Message,
        tensors: Mapping[str, torch.Tensor] | None = None,
        *,
        codec: str = "none",
    ) -> None:
        """Send a message of a session, together with whatever else is posted in this turn of the loop."""
        message.session = number
        self._channel.post(message, tensors, codec=codec)

    async def drain(self) -> None:
        """Wait while too much waits to be sent. Raises `Unreachable` if the stream is broken."""
        await self._channel.drain()

    def close(self) -> None:
        """End the stream and all its sessions."""
        self._end(Unreachable("the connection was closed", self.peer_id))
        self._reader.cancel()

    async def _read(self) -> None:
        why: LilliputError = Unreachable("the connection broke", self.peer_id)
        try:
            while (received := await self._channel.receive()) is not None:
                self._heard = self._loop.time()
                if isinstance(received.body, pb.Error) and not received.session:  # about the stream as a whole
                    why = error_of(received.body)
                session = self._sessions.get(received.session)
                if session is not None:  # it may have been closed meanwhile
                    session.take(received)
        except BadRequest as e:
            why = Unreachable(f"sent what cannot be understood: {e}", self.peer_id)
        self._end(why)

    def _end(self, why: LilliputError) -> None:
        self._closed = True
        self._channel.close()
        sessions, self._sessions = self._sessions, {}
        for session in sessions.values():
            session.lost(why)
