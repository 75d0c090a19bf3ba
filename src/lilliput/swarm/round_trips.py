"""How long messages take to other peers and back: measured by pings, kept, renewed in the background."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Iterable, Sequence

from hivemind.p2p import PeerID

from lilliput.errors import BadRequest, LilliputError
from lilliput.swarm.node import Node
from lilliput.wire import lilliput_pb2 as pb
from lilliput.wire.channel import Channel
from lilliput.wire.protocol import PING

#: what was measured is measured again when it is older than this (seconds)
FRESH_SECONDS = 60.0
#: a peer that did not answer is asked again after this long (seconds)
RETRY_SECONDS = 15.0
#: one measurement may take so long (seconds)
PING_SECONDS = 5.0
#: so many peers are measured in one go, however many there are
MOST_PEERS = 48
#: and so many of them at the same time
_AT_ONCE = 16
#: of so many pings the fastest counts: the others also measured how busy the machines are
_PINGS = 3
#: a stream takes no more pings than this
_MOST_PINGS = 100


async def answer_pings(channel: Channel, peer: PeerID) -> None:
    """Serves `PING`: every ping is answered by its pong, until the stream ends."""
    for _ in range(_MOST_PINGS):
        received = await channel.receive(within=PING_SECONDS)
        if received is None:
            return
        if not isinstance(received.body, pb.Ping):
            raise BadRequest(f"a {received.kind!r} message on a stream of pings")
        await channel.send(pb.Message(pong=pb.Pong(id=received.body.id)))


async def ping(node: Node, peer_id: str) -> float:
    """Seconds that a message takes to a peer and back. Raises `Unreachable` if there is no answer in `PING_SECONDS`."""
    channel = await node.open(peer_id, PING, within=PING_SECONDS)
    try:
        took = []
        for number in range(_PINGS):
            begun = time.perf_counter()
            await channel.send(pb.Message(ping=pb.Ping(id=number)))
            await channel.expect("pong")
            took.append(time.perf_counter() - begun)
        return min(took)
    finally:
        channel.close()


class RoundTrips:
    """Measured round trips from one node to others.

    `await renew(peers)` measures, in the background, what is not known or no longer fresh; `known` has what is known.
    """

    def __init__(self, node: Node) -> None:
        self.node = node
        #: seconds by peer id; None where the last ping was not answered
        self.known: dict[str, float | None] = {}
        self._due: dict[str, float] = {}
        self._measuring: dict[str, asyncio.Task[None]] = {}
        self._places = asyncio.Semaphore(_AT_ONCE)

    async def renew(self, peers: Iterable[str], *, within: float = 0.0) -> None:
        """Begin to measure peers, at most `MOST_PEERS` at a time, those first that were never measured.

        :param within: wait so long (seconds) for those that were never measured; for others nobody waits
        """
        now, me = time.monotonic(), str(self.node.peer_id)
        wanted = {peer for peer in peers if peer != me}
        self._forget(wanted, now)
        due = [peer for peer in wanted if self._due.get(peer, 0.0) <= now and peer not in self._measuring]
        random.shuffle(due)
        due.sort(key=lambda peer: peer in self.known)
        for peer in due[: max(MOST_PEERS - len(self._measuring), 0)]:
            task = self._measuring[peer] = asyncio.get_running_loop().create_task(self._measure(peer))
            task.add_done_callback(lambda _, peer=peer: self._measuring.pop(peer, None))  # type: ignore[misc]
        news = [task for peer, task in self._measuring.items() if peer in wanted and peer not in self.known]
        if news and within > 0:
            await asyncio.wait(news, timeout=within)

    def fastest(self, peers: Sequence[str], most: int) -> dict[str, float]:
        """Milliseconds to the nearest `most` of these peers, as far as they are known."""
        known = [(took, peer) for peer in peers if (took := self.known.get(peer)) is not None]
        return {peer: round(took * 1e3, 2) for took, peer in sorted(known)[:most]}

    def close(self) -> None:
        """Stop measuring."""
        for task in list(self._measuring.values()):
            task.cancel()

    def _forget(self, wanted: set[str], now: float) -> None:
        """Peers that nobody has asked for since they were due long ago."""
        for peer in [p for p, due in self._due.items() if p not in wanted and due + 10 * FRESH_SECONDS < now]:
            self.known.pop(peer, None)
            del self._due[peer]

    async def _measure(self, peer: str) -> None:
        async with self._places:
            took: float | None = None
            with contextlib.suppress(LilliputError, TimeoutError):
                async with asyncio.timeout(PING_SECONDS):
                    took = await ping(self.node, peer)
        self.known[peer] = took
        # not all at once, and not all clients at once
        wait = RETRY_SECONDS if took is None else FRESH_SECONDS
        self._due[peer] = time.monotonic() + wait * random.uniform(0.75, 1.25)
