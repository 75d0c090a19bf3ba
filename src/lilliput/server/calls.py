"""What a server answers on the network, whatever span it holds at the moment."""

from __future__ import annotations

from hivemind.p2p import PeerID

from lilliput.errors import Draining
from lilliput.server.client_stream import ClientStream
from lilliput.server.handler import ConnectionHandler, serve_passes
from lilliput.server.push import PushStreams
from lilliput.server.service import Service
from lilliput.swarm.node import Node
from lilliput.swarm.peer_calls import serve_peers
from lilliput.wire import protocol
from lilliput.wire.channel import Channel


class Calls:
    """The calls of one node. They are answered by one service after the other, and refused in between."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._pushes = PushStreams(node)
        self._service: Service | None = None
        self._idle_seconds = 0.0
        self._registered = False

    def service(self) -> Service:
        """Whose turn it is. Raises `Draining` if no span is held."""
        if self._service is None:
            raise Draining("this server is moving to other blocks; ask another one")
        return self._service

    async def begin(self, service: Service) -> None:
        """From now on this service answers."""
        service.pushes, service.pushed_sessions = self._pushes, self._pushes.sessions
        self._service, self._idle_seconds = service, service.idle_seconds
        if self._registered:
            return
        self._registered = True
        node = self._node
        await node.serve(protocol.PUSH, self._pushes.serve)
        await node.serve(protocol.FORWARD_INCREMENTAL, self._serve_sessions)
        await node.serve(protocol.FORWARD, self._serve_forward)
        await node.serve(protocol.BACKWARD, self._serve_backward)
        await serve_peers(node)
        await ConnectionHandler(service.model, self.service, node).add_p2p_handlers(node.p2p)

    def end(self) -> None:
        """From now on nobody answers, and nothing here refers to the service."""
        self._service = None

    def close(self) -> None:
        """End the streams to other servers."""
        self._pushes.close()

    async def _serve_sessions(self, channel: Channel, peer: PeerID) -> None:
        await ClientStream(self.service(), channel, str(peer)).run()

    async def _serve_forward(self, channel: Channel, peer: PeerID) -> None:
        await serve_passes(self.service, channel, "forward", str(peer), self._idle_seconds)

    async def _serve_backward(self, channel: Channel, peer: PeerID) -> None:
        await serve_passes(self.service, channel, "backward", str(peer), self._idle_seconds)
