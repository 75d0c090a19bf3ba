"""A client's connection to a swarm: one peer, what it knows of the servers, and streams that are kept open."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch

from lilliput.client.costs import SESSION, RoundTripTimes, Use
from lilliput.client.peer_stream import PeerStream
from lilliput.client.route import Guard, Hop, find_chain, missing_blocks, usable
from lilliput.errors import LilliputError, MissingAdapter, MissingBlocks, ModelError, RequestError, Unreachable
from lilliput.swarm import directory
from lilliput.swarm.loop import LoopThread
from lilliput.swarm.node import Node
from lilliput.swarm.records import ServerRecord
from lilliput.swarm.renewed_node import RenewedNode
from lilliput.swarm.round_trips import RoundTrips
from lilliput.wire import lilliput_pb2 as pb
from lilliput.wire.channel import Channel
from lilliput.wire.protocol import FORWARD_INCREMENTAL

T = TypeVar("T")
K = TypeVar("K")

#: look-ups younger than this are used as they are (seconds)
FRESH_SECONDS = 5.0
#: older than this they are not used at all, but waited for: by then a server that lives has announced itself again
STALE_SECONDS = directory.LEASE_SECONDS * 2 / 3
#: a route waits so long for the first pings of servers that were never measured, if it needs them (seconds)
FIRST_PING_SECONDS = 1.0
#: a peer that failed us is passed over for this long
BAN_SECONDS = 20.0
#: one that was full is passed over for this long: such servers announce it within a second
FULL_SECONDS = 3.0
#: servers that could not reach one another are not asked to push for this long
UNLINKED_SECONDS = 60.0
#: so many idle streams are kept for each peer and call
_IDLE_STREAMS = 8


@dataclass(frozen=True)
class Patience:
    """How long a client waits, in seconds. Every wait is finite."""

    #: for a stream to a server to open
    connect: float = 10.0
    #: for a server's answer to the first message of a session
    open: float = 30.0
    #: in the queues of full servers; 0 raises `Busy` at once
    queue: float = 0.0
    #: for the output of one step, or of one forward or backward call
    step: float = 300.0
    #: for any sign of life from a server that has been asked for one; longer while much is on its way
    silence: float = 5.0
    #: how many chains are tried for a new session, and how many servers may fail within one step
    attempts: int = 5
    #: for somebody to take over from a server that failed in a running session
    recovery: float = 30.0
    #: between two looks of a running session for a faster chain, to which it moves if that pays; math.inf: it stays
    look_around: float = 30.0


class _Lately(Generic[K]):
    """What happened in the last so many seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until: dict[K, float] = {}

    def add(self, key: K) -> None:
        self._until[key] = time.monotonic() + self._seconds

    def forget(self) -> None:
        self._until.clear()

    def members(self) -> set[K]:
        now = time.monotonic()
        self._until = {key: until for key, until in self._until.items() if until > now}
        return set(self._until)


@dataclass
class _Lookup:
    announcements: list[directory.Announcement]
    at: float

    @property
    def records(self) -> list[ServerRecord]:
        """Of those whose leases have not ended since."""
        return [announcement.record for announcement in self.announcements if announcement.counts]


class Connection:
    """A peer that is only a client. Belongs to one event loop; everything here happens on it."""

    def __init__(self, initial_peers: Iterable[str], **node_options: Any) -> None:
        """:param node_options: of `Node.start`"""
        self.initial_peers = tuple(str(peer) for peer in initial_peers)
        self._node = RenewedNode(initial_peers=self.initial_peers, client_mode=True, **node_options)
        self.closed = False
        self._lookups: dict[str, _Lookup] = {}
        self._asking: dict[str, asyncio.Future[list[ServerRecord]]] = {}
        self._round_trips: RoundTrips | None = None
        self._banned, self._full = _Lately[str](BAN_SECONDS), _Lately[str](FULL_SECONDS)
        #: peers that were found out, which nobody uses any more
        self.convicted: set[str] = set()
        self._unlinked = _Lately[tuple[str, str]](UNLINKED_SECONDS)
        self._session_streams: dict[str, asyncio.Future[PeerStream]] = {}
        self._streams: defaultdict[tuple[str, str], list[Channel]] = defaultdict(list)

    async def node(self) -> Node:
        """The peer, once it has started. Raises what went wrong if it could not."""
        return await self._node.get()

    def try_again(self) -> None:
        """If the peer could not be started, as when nobody was there to join, begin once more."""
        self._node.try_again()

    # -- who serves what

    async def records(self, model: str, *, fresh: bool = False) -> list[ServerRecord]:
        """The servers of a model. Recent look-ups are reused and renewed in the background, unless `fresh`."""
        known = self._lookups.get(model)
        age = time.monotonic() - known.at if known else STALE_SECONDS
        if known is None or fresh or age >= STALE_SECONDS:
            return await asyncio.shield(self._ask(model))
        if age >= FRESH_SECONDS:
            self._ask(model)
        return known.records

    def _ask(self, model: str) -> asyncio.Future[list[ServerRecord]]:
        if model not in self._asking:
            task = self._asking[model] = asyncio.ensure_future(self._look_up(model))
            task.add_done_callback(lambda done: self._asked(model, done))
        return self._asking[model]

    def _asked(self, model: str, done: asyncio.Future[list[ServerRecord]]) -> None:
        del self._asking[model]
        _retrieve(done)

    async def _look_up(self, model: str) -> list[ServerRecord]:
        announcements = await directory.look_up(await self.node(), model)
        random.shuffle(announcements)  # so that not all clients choose the same among equals
        known = self._lookups[model] = _Lookup(announcements, time.monotonic())
        return known.records

    async def prefetch(self, model: str) -> None:
        """Look a model up, and measure the ways to its servers, for whoever asks next. Raises nothing."""
        with contextlib.suppress(LilliputError):
            await self.round_trips(await self.records(model), within=0.0)

    async def round_trips(
        self, records: Sequence[ServerRecord], *, within: float = FIRST_PING_SECONDS
    ) -> RoundTripTimes:
        """What is known about the ways to servers. The first pings are waited for, but not for long."""
        node = await self.node()
        if self._round_trips is None or self._round_trips.node is not node:
            self._round_trips = RoundTrips(node)
        await self._round_trips.renew([record.peer_id for record in records if usable(record)], within=within)
        return self._round_trips.known

    async def chain(
        self,
        model: str,
        start: int,
        end: int,
        *,
        fingerprint: str = "",
        adapter: str = "",
        banned: Collection[str] = frozenset(),
        use: Use = SESSION,
        pushes: bool = False,
        guard: Guard | None = None,
    ) -> list[Hop]:
        """A chain of servers for blocks `[start, end)`; `use`, `pushes` and `guard` as of `find_chain`.

        :param adapter: only servers that announce it; empty: any

        Raises `MissingBlocks` (`MissingAdapter`), or `ModelError` for a mix-up.
        """

        async def cheapest(records: list[ServerRecord], banned: set[str]) -> list[Hop]:
            measured = self._round_trips.known if self._round_trips is not None else {}
            records = [record for record in records if not adapter or adapter in record.adapters]
            known = [record for record in records if usable(record, banned) and record.peer_id in measured]
            # who has joined lately is worth waiting for where nobody else would do
            within = FIRST_PING_SECONDS if missing_blocks(known, start, end) else 0.0
            ways = await self.round_trips(records, within=within)
            return find_chain(records, start, end, banned=banned, round_trips=ways, use=use, pushes=pushes, guard=guard)

        banned = self.convicted | set(banned)
        avoid = self.banned() | self._full.members() | banned
        try:
            return await cheapest(_same_model(await self.records(model), fingerprint), avoid)
        except MissingBlocks:
            pass
        # perhaps someone has joined since, and better someone who failed us lately than nobody
        records = _same_model(await self.records(model, fresh=True), fingerprint)
        for passed_over in (avoid, banned):
            try:
                return await cheapest(records, passed_over)
            except MissingBlocks as e:
                missing = e
        if adapter and not missing_blocks([record for record in records if usable(record, banned)], start, end):
            spans = ", ".join(f"{a}:{b}" for a, b in missing.blocks)
            raise MissingAdapter(
                f"no server that holds blocks {spans} of {model} has the adapter {adapter!r}; "
                f"start them with --adapter {adapter}=FOLDER",
                missing.blocks,
            )
        raise MissingBlocks(_explain(missing, model, records), missing.blocks)

    def ban(self, peer_id: str) -> None:
        """Pass a peer over for a while: it did not do what it said it would."""
        self._banned.add(peer_id)

    def note_full(self, peer_id: str) -> None:
        """A peer had no room for a session; its record will tell in a moment."""
        self._full.add(peer_id)

    def convict(self, peer_id: str) -> None:
        """Never use a peer again: it was found to return what is wrong."""
        self.convicted.add(peer_id)

    def banned(self) -> set[str]:
        """Peers that failed us lately."""
        return self._banned.members()

    def unlink(self, peer_id: str, next_peer_id: str) -> None:
        """The first of these servers could not push to the second one: for a while, carry between them."""
        self._unlinked.add((peer_id, next_peer_id))

    def linked(self, peer_id: str, next_peer_id: str) -> bool:
        """Whether the first of these servers may push to the second one."""
        return (peer_id, next_peer_id) not in self._unlinked.members()

    # -- streams

    async def open(self, peer_id: str, call: str, *, within: float) -> Channel:
        """A new stream to a server. Raises `Unreachable`."""
        return await (await self.node()).open(peer_id, call, within=within)

    async def session_stream(self, peer_id: str, *, within: float) -> tuple[PeerStream, bool]:
        """The stream for sessions on a server, and whether it was opened just now. Raises `Unreachable`."""
        opening = self._session_streams.get(peer_id)
        if opening is not None and (not opening.done() or _is_usable(opening)):
            return await asyncio.shield(opening), False

        async def open_stream() -> PeerStream:
            return PeerStream(await self.open(peer_id, FORWARD_INCREMENTAL, within=within), peer_id)

        opening = self._session_streams[peer_id] = asyncio.ensure_future(open_stream())
        opening.add_done_callback(_retrieve)
        return await asyncio.shield(opening), True

    async def ask(
        self,
        peer_id: str,
        call: str,
        question: Callable[[], pb.Message],
        tensors: Mapping[str, torch.Tensor],
        *,
        codec: str,
        patience: Patience,
    ) -> Mapping[str, torch.Tensor]:
        """One question and its answer's tensors. Streams are kept open for the next question.

        :param question: makes the message; called again if a stream that was kept turns out to be closed
        """
        idle = self._streams[peer_id, call]
        while True:
            kept = bool(idle)
            channel = idle.pop() if kept else await self.open(peer_id, call, within=patience.connect)
            try:
                async with asyncio.timeout(patience.step):
                    await channel.send(question(), tensors, codec=codec)
                    received = await channel.expect("output")
            except TimeoutError as e:
                channel.close()
                raise Unreachable(f"no output within {patience.step:.0f} s", peer_id) from e
            except Unreachable:
                channel.close()
                if kept:
                    continue
                raise
            except RequestError:
                self._keep(idle, channel)  # the server has answered, if not as we hoped
                raise
            except BaseException:
                channel.close()
                raise
            self._keep(idle, channel)
            return received.tensors

    @staticmethod
    def _keep(idle: list[Channel], channel: Channel) -> None:
        if len(idle) < _IDLE_STREAMS and not channel.gone:
            idle.append(channel)
        else:
            channel.close()

    async def close(self) -> None:
        self.closed = True
        if self._round_trips is not None:
            self._round_trips.close()
        for channels in self._streams.values():
            for channel in channels:
                channel.close()
        self._streams.clear()
        for opening in self._session_streams.values():
            opening.cancel()
            if _is_usable(opening):
                opening.result().close()
        await self._node.close()


def _retrieve(done: asyncio.Future[Any]) -> None:
    """Whoever waited has the error; if nobody did, nobody misses it."""
    if not done.cancelled():
        done.exception()


def _is_usable(opening: asyncio.Future[PeerStream]) -> bool:
    return opening.done() and not opening.cancelled() and opening.exception() is None and opening.result().usable


def _same_model(records: list[ServerRecord], fingerprint: str) -> list[ServerRecord]:
    same = [r for r in records if not fingerprint or not r.fingerprint or r.fingerprint == fingerprint]
    if records and not same:
        raise ModelError(
            f"the swarm's {records[0].model} is not the model of these files: "
            f"their fingerprint is {fingerprint}, the servers have {records[0].fingerprint}"
        )
    return same


def _explain(missing: MissingBlocks, model: str, records: list[ServerRecord]) -> str:
    text = f"{missing} of {model}"
    leaving = [r for r in records if r.state != "serving"]
    if not records:
        return f"{text}: no server of this model is in the swarm"
    if leaving:
        return f"{text} ({len(leaving)} of {len(records)} servers are joining or leaving)"
    return text


class SharedConnection:
    """A connection with its own loop thread, for synchronous callers: one per process and set of initial peers.

    Each `SharedConnection.to(peers)` is to be ended by one `close()`; the last one ends the peer.
    """

    _all: ClassVar[dict[tuple[Any, ...], SharedConnection]] = {}
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, key: tuple[Any, ...], initial_peers: Iterable[str], **node_options: Any) -> None:
        self._key, self._users = key, 0
        self.loop = LoopThread("lilliput-client")

        async def connect() -> Connection:
            return Connection(initial_peers, **node_options)

        self.connection = self.loop.run(connect())
        self.loop.at_stop(self.connection.close)

    @classmethod
    def to(cls, initial_peers: Iterable[str], **node_options: Any) -> SharedConnection:
        """The connection to these peers. Returns at once: the peer starts in the background."""
        peers = [initial_peers] if isinstance(initial_peers, str) else [str(peer) for peer in initial_peers]
        key = (os.getpid(), tuple(sorted(peers)), repr(sorted(node_options.items())))
        with cls._lock:
            shared = cls._all.get(key)
            if shared is None:
                shared = cls._all[key] = cls(key, peers, **node_options)
            shared._users += 1
            return shared

    def run(self, coro: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run a coroutine on the connection's loop and wait for it."""
        return self.loop.run(coro, timeout)

    def close(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users > 0:
                return
            self._all.pop(self._key, None)
        self.loop.stop()
