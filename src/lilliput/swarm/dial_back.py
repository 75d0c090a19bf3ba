"""Whether a peer can be reached from outside: only another can tell. Servers answer, and dial who asks, nobody else."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version

from hivemind.p2p import PeerID
from hivemind.utils.multiaddr import Multiaddr

from lilliput.errors import BadRequest
from lilliput.swarm.addresses import checked, host_and_port
from lilliput.swarm.node import Node
from lilliput.wire import lilliput_pb2 as pb
from lilliput.wire.channel import Channel
from lilliput.wire.protocol import DIAL_BACK

DIAL_SECONDS = 5.0
ASK_SECONDS = 20.0
_MOST_ADDRESSES = 4
#: what every libp2p peer says first to whoever connects
_GREETING = b"/multistream/1.0.0"


@dataclass(frozen=True)
class DialledBack:
    """What a peer has seen of us.

    :ivar outcomes: by address, as far as it tried: empty if somebody answers there, or why not
    :ivar seen_at: the host from which we come
    :ivar clock: how far its clock is ahead of ours (seconds), give or take half of `round_trip`
    """

    outcomes: dict[str, str]
    seen_at: str
    clock: float
    round_trip: float
    version: str


async def ask(node: Node, peer_id: str, addresses: Sequence[str]) -> DialledBack:
    """Have a peer try to dial us at these addresses. Raises `Unreachable` if it cannot be asked, or `Unauthorized`."""
    channel = await node.open(peer_id, DIAL_BACK, within=ASK_SECONDS)
    try:
        async with asyncio.timeout(ASK_SECONDS):
            begun = time.time()
            await channel.send(pb.Message(dial_back=pb.DialBack()))
            clock = (await channel.expect("dialled")).body
            took = time.time() - begun
            ahead = clock.time - begun - took / 2  # type: ignore[attr-defined]
            await channel.send(pb.Message(dial_back=pb.DialBack(addresses=addresses[:_MOST_ADDRESSES])))
            answer = (await channel.expect("dialled")).body
    finally:
        channel.close()
    assert isinstance(answer, pb.Dialled)
    outcomes = dict(zip(answer.addresses, answer.outcomes, strict=False))
    return DialledBack(outcomes, answer.seen_at, ahead, took, answer.version)


async def answer(node: Node, channel: Channel, peer: PeerID) -> None:
    """Serves `DIAL_BACK`. Only addresses with the host from which the peer comes are tried, so that nobody can have us
    knock at the doors of others."""
    seen_at = await _host_of(node, peer)
    for _ in range(2):
        received = await channel.receive(within=ASK_SECONDS)
        if received is None:
            return
        if not isinstance(received.body, pb.DialBack):
            raise BadRequest(f"a {received.kind!r} message where a dial_back was due")
        places = {address: host_and_port(checked(address)) for address in received.body.addresses[:_MOST_ADDRESSES]}
        tried = {address: place for address, place in places.items() if place and place[0] == seen_at}
        outcomes = await asyncio.gather(*(dial(*place) for place in tried.values()))
        body = pb.Dialled(addresses=tried, outcomes=outcomes, seen_at=seen_at, time=time.time())
        body.version = version("lilliput")
        await channel.send(pb.Message(dialled=body))
    await channel.hear_out()


async def dial(host: str, port: int) -> str:
    """Empty if a libp2p peer answers there, or why not, in words that say what to do."""
    where = f"TCP port {port} of {host}"
    try:
        async with asyncio.timeout(DIAL_SECONDS):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                greeting = await reader.read(64)
            finally:
                writer.close()
    except TimeoutError:
        return f"{where} does not answer: a firewall or router swallows what comes; open TCP port {port} there"
    except ConnectionRefusedError:
        return f"{where} refuses connections: nothing listens there, or a firewall refuses; open TCP port {port}"
    except socket.gaierror as e:
        return f"no such host: {host} ({e.strerror})"
    except OSError as e:
        return f"{where} cannot be reached: {e.strerror or e}"
    return "" if _GREETING in greeting else f"another program than a peer answers at {where}"


async def _host_of(node: Node, peer: PeerID) -> str:
    """The host from which a peer is connected; empty over a relay."""
    for known in await node.p2p.list_peers():
        if known.peer_id != peer:
            continue
        for address in known.addrs:
            with contextlib.suppress(Exception):
                place = host_and_port(Multiaddr(str(address)))
                if place:
                    return place[0]
    return ""
