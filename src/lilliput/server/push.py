"""Outputs that go straight to the next server of a chain: one way through k servers is k + 1 legs, not 2k.

Two servers have one stream for each direction, which all sessions share: what is pushed in one turn of the loop leaves
in one write and arrives together, so that the steps share a pass there, too. The receiver says what has arrived; what
has not is the client's to carry.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from hivemind.p2p import PeerID

from lilliput.errors import BadRequest, LilliputError
from lilliput.swarm.node import Node
from lilliput.wire import lilliput_pb2 as pb
from lilliput.wire.channel import Channel
from lilliput.wire.limits import DEFAULT_LIMITS
from lilliput.wire.protocol import PUSH

if TYPE_CHECKING:
    from lilliput.server.served_session import ServedSession

logger = logging.getLogger(__name__)

#: a peer that cannot be reached for so long, or that takes nothing for so long, is not pushed to (seconds)
PUSH_SECONDS = 5.0
_TICK_SECONDS = 0.5
#: a stream on which nothing was pushed for so long is closed (seconds)
IDLE_SECONDS = 120.0
#: so much may be on its way to one peer
_UNTAKEN_BYTES = DEFAULT_LIMITS.max_payload_bytes


@dataclass
class _Pushed:
    """On its way, kept until it has arrived."""

    message: pb.Message
    tensors: Mapping[str, torch.Tensor]
    codec: str
    failed: Callable[[], None]
    sent: float = 0.0

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


class PushStream:
    """To one peer. It is dialled when it is made, and ends when it breaks, when the peer takes nothing, or unused.

    :ivar there_and_back: seconds from when the last push left until it was taken; 0: none was yet
    """

    def __init__(self, node: Node, peer: str) -> None:
        self.peer = peer
        self.ended = False
        self.there_and_back = 0.0
        self._node = node
        self._loop = asyncio.get_running_loop()
        self._channel: Channel | None = None
        self._untaken: dict[int, _Pushed] = {}
        self._bytes = self._last_number = 0
        self._progress: tuple[int, int] = 0, 0
        self._progressed = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._task = self._loop.create_task(self._run())

    def push(
        self, body: pb.Push, tensors: Mapping[str, torch.Tensor], codec: str, *, failed: Callable[[], None]
    ) -> None:
        """Send a step on; `failed` is called, once, if it may not have arrived."""
        pushed = _Pushed(pb.Message(push=body), tensors, codec, failed)
        if self.ended or self._bytes + pushed.nbytes > _UNTAKEN_BYTES:
            failed()
            return
        self._last_number += 1
        body = pushed.message.push
        body.number = self._last_number
        self._untaken[body.number] = pushed
        self._bytes += pushed.nbytes
        if self._channel is not None:
            self._send(self._channel, pushed)
            if len(self._untaken) == 1:
                self._watch()

    def end(self) -> None:
        """Close the stream: what has not arrived has failed. May be called twice."""
        self.ended = True
        self._task.cancel()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._channel is not None:
            self._channel.close()
        untaken, self._untaken = self._untaken, {}
        for pushed in untaken.values():
            pushed.failed()

    async def _run(self) -> None:
        try:
            self._channel = channel = await self._node.open(self.peer, PUSH, within=PUSH_SECONDS)
            for pushed in self._untaken.values():  # what has come while it was dialled
                self._send(channel, pushed)
            self._watch()
            while (received := await channel.receive()) is not None:
                if isinstance(received.body, pb.Taken):
                    self._taken(received.body.number)
        except (LilliputError, ValueError) as e:
            logger.info("cannot push to %s: %s", self.peer, e)
        finally:
            self.end()

    def _send(self, channel: Channel, pushed: _Pushed) -> None:
        pushed.sent = self._loop.time()
        channel.post(pushed.message, pushed.tensors, codec=pushed.codec)

    def _taken(self, number: int) -> None:
        while self._untaken and (first := next(iter(self._untaken))) <= number:
            pushed = self._untaken.pop(first)
            self._bytes -= pushed.nbytes
            self.there_and_back = self._loop.time() - pushed.sent
        if not self._untaken:
            self._watch()

    def _watch(self) -> None:
        """While something is on its way, see that it moves; while nothing is, that this does not last for ever."""
        self._progressed = self._loop.time()
        self._tick()

    def _tick(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        assert self._channel is not None
        if not self._untaken:
            self._timer = self._loop.call_later(IDLE_SECONDS, self.end)
            return
        progress = next(iter(self._untaken)), self._channel.unsent
        if progress != self._progress:
            self._progress, self._progressed = progress, self._loop.time()
        elif self._loop.time() - self._progressed >= PUSH_SECONDS:
            logger.info("%s takes nothing that is pushed to it", self.peer)
            self.end()
            return
        self._timer = self._loop.call_later(_TICK_SECONDS, self._tick)


class PushStreams:
    """Those of one server, in both directions.

    :ivar sessions: those that other servers may push to, by their keys
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self.sessions: dict[bytes, ServedSession] = {}
        self._streams: dict[str, PushStream] = {}

    def to(self, peer: str) -> PushStream:
        """The stream to a peer, dialled if there is none."""
        stream = self._streams.get(peer)
        if stream is None or stream.ended:
            self._streams = {peer: stream for peer, stream in self._streams.items() if not stream.ended}
            stream = self._streams[peer] = PushStream(self._node, peer)
        return stream

    async def serve(self, channel: Channel, peer: PeerID) -> None:
        """Hand on what another server pushes to the sessions here. Never waits for any of them."""
        loop = asyncio.get_running_loop()
        taken = 0
        acknowledging: asyncio.Handle | None = None

        def acknowledge() -> None:
            nonlocal acknowledging
            acknowledging = None
            channel.post(pb.Message(taken=pb.Taken(number=taken)))

        while (received := await channel.receive()) is not None:
            body = received.body
            if not isinstance(body, pb.Push):
                raise BadRequest(f"a {received.kind!r} message on a stream of pushes")
            taken = body.number
            if acknowledging is None:  # one word for all that arrived in this turn of the loop
                acknowledging = loop.call_soon(acknowledge)
            session = self.sessions.get(body.push_key)
            if session is not None:  # or it has ended, as its client knows
                session.take_push(body, received.tensors)

    def close(self) -> None:
        """End all streams to others."""
        for stream in list(self._streams.values()):
            stream.end()
