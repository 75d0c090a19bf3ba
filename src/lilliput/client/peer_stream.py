"""One stream to a server, shared by all sessions that this client has there.

Steps that are sent in one turn of the loop leave in one write and run in one pass at the server; their outputs come
back the same way. For sixteen streams of tokens that is a sixteenth of the messages that each process handles.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from lilliput.errors import LilliputError, Unreachable
from lilliput.wire import lilliput_pb2 as pb
from lilliput.wire.channel import Channel, Received


class Receiver(Protocol):
    """What a session on a stream must be able to take."""

    def take(self, received: Received) -> None:
        """A message of this session. May raise a `LilliputError`, which then ends the session."""

    def lost(self, error: LilliputError) -> None:
        """Nothing will come any more."""


class PeerStream:
    """Sessions of one client on one server. Closes with the last of them.

    :param ended: called once when the stream can take no more sessions
    """

    def __init__(self, channel: Channel, peer_id: str, ended: Callable[[PeerStream], None]) -> None:
        self._channel, self._peer_id, self._ended = channel, peer_id, ended
        self._receivers: dict[int, Receiver] = {}
        self._numbers = itertools.count(1)  # 0 would have the stream for itself
        self._open = True
        self._reader = asyncio.create_task(self._read())

    @property
    def is_open(self) -> bool:
        return self._open

    def attach(self, receiver: Receiver) -> int:
        """The number of a new session."""
        number = next(self._numbers)
        self._receivers[number] = receiver
        return number

    def detach(self, number: int) -> None:
        """The session has ended. May be called twice."""
        if self._receivers.pop(number, None) is not None and not self._receivers:
            self.close()

    async def send(
        self,
        number: int,
        message: pb.Message,
        tensors: Mapping[str, torch.Tensor] | None = None,
        *,
        codec: str = "none",
    ) -> None:
        """Send a session's message. Raises `Unreachable` if the stream is broken."""
        message.session = number
        await self._channel.send(message, tensors, codec=codec)

    def post(self, number: int, message: pb.Message) -> None:
        """Send a session's small message, if it can still be sent."""
        message.session = number
        if self._open:
            self._channel.post(message)

    def close(self) -> None:
        if self._open:
            self._open = False
            self._ended(self)
        self._channel.close()
        self._reader.cancel()

    async def _read(self) -> None:
        error: LilliputError
        try:
            while (received := await self._channel.receive()) is not None:
                receiver = self._receivers.get(received.session)
                if receiver is None:
                    continue  # late, for a session that has ended
                try:
                    receiver.take(received)
                except LilliputError as e:
                    self._receivers.pop(received.session, None)
                    receiver.lost(e)
                    if not self._receivers:
                        break
            error = Unreachable("the connection broke", self._peer_id)
        except LilliputError as e:
            error = e
        if self._open:
            self._open = False
            self._ended(self)
        receivers, self._receivers = self._receivers, {}
        for receiver in receivers.values():
            with contextlib.suppress(LilliputError):
                receiver.lost(error)
        self._channel.close()
