"""A wide-area network on one machine: links in front of servers' ports that delay, throttle and cut.

A link is a TCP proxy. Put in front of a server's port and announced in its place (`serve --port P --announce ...`), it
carries whatever others send to the server and whatever comes back, since both directions of two peers' traffic share
the one connection that one of them made. Between two servers that have links, both links' delays count unless another
is set, whoever of them made the connection: p2p daemons connect from the very port on which they listen. All of it
happens in user space, in one thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections import deque
from types import TracebackType

from lilliput.swarm.loop import LoopThread

_HOST = "127.0.0.1"
_READ_BYTES = 1 << 16
#: so much may be under way in one direction of a connection before its sender has to wait
_FLIGHT_BYTES = 16 << 20


class Link:
    """A way to one port, as slow and as unreliable as its attributes say. They may be changed at any time.

    Attributes:
        port: where the link listens
        target: the port to which it leads
        delay: seconds that a byte takes, one way
        jitter: up to so many seconds more, by chance; the order stays
        bytes_per_second: how much fits through, one way and for each connection; None for all there is
        connections: how many it carries
        accepted: how many it has carried since it was made
    """

    def __init__(
        self, network: Network, target: int, delay: float, jitter: float, bytes_per_second: float | None
    ) -> None:
        self.delay, self.jitter, self.bytes_per_second = delay, jitter, bytes_per_second
        self.port = self.accepted = 0
        self.target, self._network = target, network
        self._is_cut = False
        self._moves = asyncio.Event()
        self._moves.set()
        self._carried: list[set[asyncio.Future[None]]] = []

    @property
    def connections(self) -> int:
        return len(self._carried)

    @property
    def address(self) -> str:
        """What a server announces that is to be reached over this link."""
        return f"/ip4/{_HOST}/tcp/{self.port}"

    async def _listen(self) -> None:
        server = await asyncio.start_server(self._accept, _HOST, 0)
        self.port = int(server.sockets[0].getsockname()[1])

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_cut:
            writer.transport.abort()
            return
        self.accepted += 1
        ends = [writer]
        ways: set[asyncio.Future[None]] = set()
        try:
            origin: int = writer.get_extra_info("peername")[1]
            answers, other = await asyncio.open_connection(_HOST, self.target)
            ends.append(other)
            ways = {asyncio.ensure_future(self._carry(*way, origin)) for way in ((reader, other), (answers, writer))}
            self._carried.append(ways)
            await asyncio.wait(ways)
            self._carried.remove(ways)
        except OSError:  # nobody listens there any more
            pass
        finally:
            for end in ends:
                end.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, origin: int) -> None:
        """One direction: each piece leaves when its time has come, and what it consists of fits through."""
        loop = asyncio.get_running_loop()
        under_way: deque[tuple[float, bytes]] = deque()
        changed = asyncio.Event()
        room = asyncio.Event()
        room.set()
        flying, ended = 0, False

        async def deliver() -> None:
            nonlocal flying
            while True:
                while not under_way:
                    if ended:
                        if writer.can_write_eof():
                            writer.write_eof()
                        return
                    changed.clear()
                    await changed.wait()
                due, piece = under_way.popleft()
                if (early := due - loop.time()) > 0:
                    await asyncio.sleep(early)
                await self._moves.wait()
                writer.write(piece)
                await writer.drain()
                flying -= len(piece)
                if flying < _FLIGHT_BYTES:
                    room.set()

        delivering = asyncio.ensure_future(deliver())
        last = free = 0.0
        try:
            with contextlib.suppress(OSError):
                while (piece := await reader.read(_READ_BYTES)) and not delivering.done():
                    now = loop.time()
                    free = max(free, now) + (len(piece) / self.bytes_per_second if self.bytes_per_second else 0.0)
                    delay = self._network.delay(origin, self) + random.uniform(0.0, self.jitter)
                    last = max(last, free + delay)
                    under_way.append((last, piece))
                    flying += len(piece)
                    changed.set()
                    if flying >= _FLIGHT_BYTES:
                        room.clear()
                        await room.wait()
            ended = True
            changed.set()
            with contextlib.suppress(OSError, RuntimeError):  # the other end is closed already
                await delivering
        finally:
            delivering.cancel()

    def _cut(self) -> None:
        self._is_cut = True
        for ways in self._carried:
            for way in ways:
                way.cancel()

    def _mend(self) -> None:
        self._is_cut = False
        self._moves.set()


class Network:
    """Links, and the thread that runs them. End it with `close` or a `with` block."""

    def __init__(self) -> None:
        self._loop = LoopThread("lilliput-network")
        self._links: dict[int, Link] = {}
        self._between: dict[frozenset[int], float] = {}

    def link(
        self,
        target: int | None = None,
        *,
        delay: float = 0.0,
        jitter: float = 0.0,
        bytes_per_second: float | None = None,
    ) -> Link:
        """A new link to a port of this machine (by default a free one); `delay` and `jitter` in seconds, one way."""
        target = _free_port() if target is None else target
        link = self._links[target] = Link(self, target, delay, jitter, bytes_per_second)
        self._loop.run(link._listen())
        return link

    def set_between(self, one: Link, other: Link, delay: float) -> None:
        """Seconds, one way, between the servers of two links; without this, the sum of both links' delays."""
        self._between[frozenset((one.target, other.target))] = delay

    def delay(self, origin: int, link: Link) -> float:
        """Seconds, one way, between whoever connected from port `origin` and the server of `link`."""
        if (there := self._links.get(origin)) is None:
            return link.delay
        return self._between.get(frozenset((origin, link.target)), there.delay + link.delay)

    def cut(self, link: Link) -> None:
        """Break all connections of a link, and refuse new ones until `mend`."""
        self._loop.loop.call_soon_threadsafe(link._cut)

    def stall(self, link: Link) -> None:
        """Hold back whatever is under way, in silence, until `mend`: nobody is told that anything is wrong."""
        self._loop.loop.call_soon_threadsafe(link._moves.clear)

    def mend(self, link: Link) -> None:
        """Undo `cut` and `stall`."""
        self._loop.loop.call_soon_threadsafe(link._mend)

    def close(self) -> None:
        async def end() -> None:
            for link in self._links.values():
                link._cut()
            await asyncio.sleep(0)

        self._loop.run(end())
        self._loop.stop()

    def __enter__(self) -> Network:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])
