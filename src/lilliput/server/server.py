"""`Server`: a process's span of blocks, on the network; one after the other, if it may choose them.

It is a `hivemind.moe.Server` to those who run it (`run_in_background`, `ready`, `shutdown`) and to those who call it
(`RemoteExpert`). What it replaces is the process model inside: RPCs run on one event loop in this process, the device
belongs to the engine's thread, and nothing is forked.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import hivemind.moe
from hivemind.p2p import PeerID
from hivemind.utils.multiaddr import Multiaddr

from lilliput.errors import LilliputError, ModelError
from lilliput.models import quantization
from lilliput.models.machine import device_called
from lilliput.models.sources import ModelFiles
from lilliput.server.announcer import Announcer
from lilliput.server.calls import Calls
from lilliput.server.leaving import FAREWELL_SECONDS, drain, farewell
from lilliput.server.loading import DTYPES, Loaded, clear_away, in_thread, load
from lilliput.server.mover import Mover
from lilliput.server.options import ServerOptions
from lilliput.server.service import Service
from lilliput.server.survey import survey
from lilliput.swarm.daemon import daemon_ended
from lilliput.swarm.loop import new_event_loop, uninterrupted
from lilliput.swarm.node import Node
from lilliput.swarm.placement import Span
from lilliput.swarm.swarm_key import SwarmKey

logger = logging.getLogger(__name__)

#: sessions have so long to move before a server goes to blocks that others hold, too (seconds)
_MOVE_SECONDS = 60.0
_NONE: Span = (0, 0)


class _Peer:
    """What users of `hivemind.moe.Server` read from its `dht`."""

    def __init__(self, peer_id: PeerID, addresses: Sequence[str]) -> None:
        self.peer_id, self._addresses = peer_id, tuple(addresses)

    def get_visible_maddrs(self, latest: bool = False) -> list[Multiaddr]:
        return [Multiaddr(address) for address in self._addresses]


class Server(hivemind.moe.Server):
    """Serves blocks `[start, end)` of a model.

    >>> server = Server("smollm2", (0, 10))
    >>> server.run_in_background()
    >>> server.addresses   # what other servers and clients pass as initial_peers
    >>> server.shutdown()

    :param model: a model's name, folder, or hub id (see `models.sources.resolve`)
    :param blocks: the first block and the one after the last; None: as many as fit into memory (or the option
        `num_blocks`), where they help the swarm most, and others when those need it more
    :param initial_peers: addresses of servers to join; none starts a new swarm
    :param host_maddrs: where to listen; by default a random port on loopback
    :param announce_maddrs, identity_path, nat, relays, swarm_key: see `swarm.node.Node.start`
    :param progress: called with a word about what is being done while the server starts
    """

    def __init__(
        self,
        model: str | ModelFiles,
        blocks: Span | None = None,
        *,
        initial_peers: Sequence[str] = (),
        host_maddrs: Sequence[str] | None = None,
        announce_maddrs: Sequence[str] | None = None,
        identity_path: str | None = None,
        nat: bool = False,
        relays: Sequence[str] | None = None,
        swarm_key: SwarmKey | str | os.PathLike[str] | None = None,
        options: ServerOptions | None = None,
        progress: Callable[[str], None] = lambda stage: None,
        **overrides: Any,
    ) -> None:
        threading.Thread.__init__(self, name="lilliput-server", daemon=True)
        self.options = replace(options or ServerOptions(), **overrides)
        if self.options.dtype not in DTYPES:
            raise ModelError(f"unknown dtype {self.options.dtype!r}; known are {', '.join(DTYPES)}")
        quantization.check(self.options.quantize, device_called(self.options.device))
        if self.options.cache_dtype not in (None, self.options.dtype, "int8"):
            raise ModelError(
                f"the cache is kept in {self.options.dtype} or in int8, not in {self.options.cache_dtype!r}"
            )
        self.model = model
        self.blocks: Span = _NONE if blocks is None else (int(blocks[0]), int(blocks[1]))
        self._chooses = blocks is None
        self._mover: Mover | None = None
        self._calls: Calls | None = None
        self._node_options: dict[str, Any] = {
            "initial_peers": tuple(initial_peers),
            "host_maddrs": host_maddrs,
            "announce_maddrs": announce_maddrs,
            "identity_path": identity_path,
            "nat": nat,
            "relays": relays,
            "swarm_key": SwarmKey.of(swarm_key),
            "peer_rate": self.options.peer_rate,
        }
        self._progress = progress
        self._ready = threading.Event()
        #: set when the server is ready, or has failed
        self.decided = threading.Event()
        self._failure: BaseException | None = None
        #: `join` would do, but in Python before 3.13 a signal that interrupts it has the thread taken for ended
        self._ended = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._draining: asyncio.Event | None = None
        self._shutdown_requested = False
        self._started_at = time.time()
        self.addresses: tuple[str, ...] = ()
        self.dht: _Peer | None = None
        self.module_backends: dict[str, Any] = {}
        self.service: Service | None = None

    # ---- hivemind.moe.Server's life cycle ----

    @classmethod
    def create(cls, model: str, blocks: Span | None = None, *, start: bool = True, **options: Any) -> Server:  # type: ignore[override]
        """A server, running already if `start`."""
        server = cls(model, blocks, **options)
        if start:
            server.run_in_background(await_ready=True)
        return server

    def run(self) -> None:
        """Serve in this thread until `shutdown`. Errors of the start are raised by `run_in_background`."""
        try:
            with asyncio.Runner(loop_factory=new_event_loop) as runner:
                runner.run(self._main())
        except BaseException as e:
            self._failure = e
            if not isinstance(e, LilliputError | asyncio.CancelledError):
                logger.exception("the server failed")
        finally:
            self._ready.clear()
            self.decided.set()
            self._ended.set()

    def run_in_background(self, await_ready: bool = True, timeout: float | None = None) -> None:
        """Start; if `await_ready`, return when the server can be used, or raise why it cannot."""
        self.start()
        if await_ready:
            if not self.decided.wait(timeout):
                raise TimeoutError(f"the server was not ready within {timeout} s")
            self.raise_failure()

    def raise_failure(self) -> None:
        """Raise what ended the server, if something did."""
        if self._failure is not None:
            raise self._failure

    @property
    def ready(self) -> threading.Event:  # type: ignore[override]
        """Set while the server can be used."""
        return self._ready

    def shutdown(self, timeout: float | None = 10.0) -> None:
        """Tell the sessions, withdraw the record, end daemon and engine. May be called twice, from any thread.

        :param timeout: for all that, in seconds. What a signal raises meanwhile is raised when it is done.
        """
        self._shutdown_requested = True
        if self._loop is not None and self._stopping is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended already
                self._loop.call_soon_threadsafe(self._stopping.set)
        if self.ident is not None and threading.current_thread() is not self:
            uninterrupted(self._ended.wait, threading.TIMEOUT_MAX if timeout is None else timeout)
            if self._ended.is_set():
                self.join()

    def drain(self) -> None:
        """Take nothing new, let running sessions move elsewhere for `drain_seconds`, then leave. Returns at once.

        Whoever wants to know waits for the thread (`join`); `shutdown` cuts it short. May be called from any thread.
        """
        if self._loop is None or self._draining is None or not self._ready.is_set():
            self.shutdown(0.0)
            return
        with contextlib.suppress(RuntimeError):  # the loop has ended already
            self._loop.call_soon_threadsafe(self._draining.set)

    def __enter__(self) -> Server:
        if not self.is_alive():
            self.run_in_background()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    # ---- the server's own thread ----

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping, self._draining = asyncio.Event(), asyncio.Event()
        if self._shutdown_requested:
            return
        stopped = asyncio.ensure_future(self._stopping.wait())
        drained = asyncio.ensure_future(self._draining.wait())
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(stopped.cancel)
            stack.callback(drained.cancel)
            starting = asyncio.ensure_future(Node.start(**self._node_options))
            stack.push_async_callback(_stop_node, starting)
            stack.push_async_callback(self._give_up_claim)
            while await self._hold(starting, stopped, drained):
                pass

    async def _hold(
        self, starting: asyncio.Future[Node], stopped: asyncio.Future[Any], drained: asyncio.Future[Any]
    ) -> bool:
        """Hold one span, from reading its blocks to the end of its sessions. Returns whether another one follows."""
        async with contextlib.AsyncExitStack() as stack:
            # the daemon starts while the blocks are read
            abandoned = threading.Event()
            loading = asyncio.ensure_future(self._load(starting, abandoned))
            stack.callback(_abandon, loading, abandoned)
            first = asyncio.gather(asyncio.shield(starting), loading)
            first.add_done_callback(lambda done: done.cancelled() or done.exception())  # it may come too late
            waiting: set[asyncio.Future[Any]] = {first, stopped}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if not first.done():
                first.cancel()
                await asyncio.wait({loading}, timeout=FAREWELL_SECONDS)
                return False
            node, loaded = first.result()
            await self._begin(node, loaded)
            announcer = self._announcer(node, loaded)
            await announcer.announce()
            announcing = asyncio.ensure_future(announcer.go_on())
            stack.callback(announcing.cancel)
            moving = asyncio.ensure_future(self._wish_to_move(announcer))
            stack.callback(moving.cancel)
            lost = asyncio.ensure_future(node.lost())
            stack.callback(lost.cancel)
            self._ready.set()
            self.decided.set()
            logger.info("serving blocks %d:%d of %s", *self.blocks, loaded.service.model)
            waiting = {stopped, drained, announcing, moving, lost}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            failed = announcing.done() or lost.done()
            announcing.cancel()
            if not (stopped.done() or failed):
                patient = not drained.done() and self._mover is not None and not self._mover.urgent
                await drain(announcer, stopped, _MOVE_SECONDS if patient else self.options.drain_seconds)
            self._ready.clear()
            leaves = stopped.done() or drained.done() or failed
            await farewell(announcer, leaves=leaves)
            if lost.done() and not stopped.done():
                raise daemon_ended()
            if failed:
                announcing.result()
            if not leaves:
                self.blocks = moving.result()
                self._end()
            return not leaves

    async def _load(self, starting: asyncio.Future[Node], abandoned: threading.Event) -> Loaded:
        """Read the blocks; first choose them, where nobody has."""

        def read(span: Span) -> Loaded:
            if self._calls is not None:
                clear_away()
            loaded = load(self.model, span, self.options, self._progress)
            if abandoned.is_set():  # nobody waits for it any more
                loaded.service.engine.stop()
            return loaded

        if not self._chooses:
            return await in_thread(lambda: read(self.blocks))
        if self._mover is None:
            outlook = await in_thread(lambda: survey(self.model, self.options, self._progress))
            node = await asyncio.shield(starting)
            self._progress("choosing blocks")
            self._mover = Mover(
                node,
                outlook.record(node, self.options, await node.addresses(), self._started_at),
                block_rate=outlook.block_rate,
                alone=not self._node_options["initial_peers"],
                look_seconds=self.options.rebalance_seconds,
                lease_seconds=self.options.lease_seconds,
            )
        if self.blocks == _NONE:
            self.blocks = await self._mover.choose()
        loaded = await self._mover.read(self.blocks, lambda span: in_thread(lambda: read(span)))
        self.blocks = loaded.service.span.start, loaded.service.span.end
        self._mover.block_rate = loaded.throughput * (self.blocks[1] - self.blocks[0])
        return loaded

    async def _begin(self, node: Node, loaded: Loaded) -> None:
        """Answer calls with what was loaded."""
        if self._calls is None:
            self._calls = Calls(node)
        self.service = service = loaded.service
        await self._calls.begin(service)
        self.addresses = tuple(await node.addresses())
        self.dht = _Peer(node.peer_id, self.addresses)
        self.module_backends = {
            f"{loaded.files.uid_prefix}.{block}": service.span.shapes[block] for block in range(*self.blocks)
        }

    def _end(self) -> None:
        """Let go of a span that is left for another, so that its memory is free."""
        assert self._calls is not None
        self._calls.end()
        self.service, self.module_backends = None, {}

    async def _wish_to_move(self, announcer: Announcer) -> Span:
        """Return when another span needs this server more, and which. For most servers: never."""
        if self._mover is None or not self.options.rebalance_seconds:
            await asyncio.get_running_loop().create_future()
        assert self._mover is not None

        async def tell(span: Span | None) -> None:
            announcer.moving_to = span
            await announcer.announce()

        return await self._mover.watch(self.blocks, tell)

    async def _give_up_claim(self) -> None:
        """Whoever has said that it comes, and does not, takes it back."""
        if self._calls is not None:
            self._calls.close()
        if self._mover is not None:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(FAREWELL_SECONDS):
                    await self._mover.withdraw()

    def _announcer(self, node: Node, loaded: Loaded) -> Announcer:
        options = self.options
        return Announcer(
            node,
            loaded.service,
            name=options.name,
            fingerprint=loaded.files.fingerprint,
            model_blocks=loaded.model_blocks,
            dtype=options.precision,
            throughput=loaded.throughput,
            addresses=self.addresses,
            lease_seconds=options.lease_seconds,
            uid_prefix=loaded.files.uid_prefix if options.declare_uids else "",
            started_at=self._started_at,
        )


async def _stop_node(starting: asyncio.Future[Node]) -> None:
    if not starting.done():
        starting.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await (await starting).stop()


def _abandon(loading: asyncio.Future[Loaded], abandoned: threading.Event) -> None:
    """Stop the engine, or have it stopped when it has been made after all."""
    abandoned.set()
    if loading.done() and not loading.cancelled() and loading.exception() is None:
        loading.result().service.engine.stop()
