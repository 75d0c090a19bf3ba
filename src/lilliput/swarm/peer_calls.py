"""The calls that every lasting peer answers, whether it serves blocks or not."""

from __future__ import annotations

from lilliput.swarm import dial_back
from lilliput.swarm.node import Node
from lilliput.swarm.round_trips import answer_pings
from lilliput.wire.protocol import DIAL_BACK, PING


async def serve_peers(node: Node) -> None:
    """Answer pings, and those who ask whether they can be dialled."""
    await node.serve(PING, answer_pings)
    await node.serve(DIAL_BACK, lambda channel, peer: dial_back.answer(node, channel, peer))
