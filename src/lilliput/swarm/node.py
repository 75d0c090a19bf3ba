"""One peer of the swarm: a p2p daemon, a DHT node, and streams to and from other peers.

All of it lives on the event loop that starts it; nothing is forked. The daemon is a child process that ends as soon as
the connection that this process keeps open to it ends, so it never outlives its owner, however that one dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import random
import socket
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from typing import IO, Any, cast

from hivemind.dht import DHTNode
from hivemind.p2p import P2P, P2PDaemonError, PeerID
from hivemind.utils import MSGPackSerializer
from hivemind.utils.multiaddr import Multiaddr

from lilliput.errors import BadRequest, LilliputError, SwarmError, Unreachable
from lilliput.swarm.identity import Identity
from lilliput.swarm.signatures import Signatures
from lilliput.swarm.sockets import remove_stale_sockets
from lilliput.wire.channel import Channel

log = logging.getLogger(__name__)

StreamCallback = Callable[[Channel, PeerID], Awaitable[None]]

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
#: a daemon starts in 0.2 s; when many start at once on a slow machine it takes far longer
STARTUP_SECONDS = 60.0
#: how often starting is tried again when the daemon was too slow or the bootstrap peers are not there yet
STARTUP_ATTEMPTS = 3
OPEN_SECONDS = 10.0
#: a daemon that nobody connects to (we were killed while it started) ends by itself after this long
_ORPHAN_SECONDS = 20.0
_STOP_SECONDS = 3.0
#: a fork takes milliseconds
_FORK_AGAIN_SECONDS = 0.01, 0.1


class _TolerantSerializer(MSGPackSerializer):
    """One entry that cannot be read would leave hivemind's search waiting for ever; here it reads as None."""

    @classmethod
    def loads(cls, buf: bytes) -> object:
        try:
            return super().loads(buf)
        except Exception:
            return None


class Node:
    """A peer on the running event loop. Make one with `await Node.start(...)`, end it with `await node.stop()`.

    Attributes:
        p2p: hivemind's handle of the daemon
        dht: hivemind's DHT node
        signatures: what signs and checks DHT entries
        peer_id: this peer's id
        lease_ends: until when each of this node's DHT entries was last announced (see `directory`)
    """

    def __init__(self, p2p: P2P, dht: DHTNode, signatures: Signatures, identity_file: IO[bytes]) -> None:
        self.p2p, self.dht, self.signatures = p2p, dht, signatures
        self.peer_id: PeerID = p2p.peer_id
        self.lease_ends: dict[tuple[str, str], float] = {}
        self._identity_file = identity_file
        self._handlers: set[asyncio.Task[Any]] = set()
        self._stopped = False

    @classmethod
    async def start(
        cls,
        initial_peers: Sequence[str] = (),
        *,
        host_maddrs: Sequence[str] | None = None,
        announce_maddrs: Sequence[str] | None = None,
        identity_path: str | os.PathLike[str] | None = None,
        client_mode: bool = False,
        nat: bool = False,
        startup_timeout: float = STARTUP_SECONDS,
    ) -> Node:
        """Start a daemon and join the swarm.

        :param initial_peers: full addresses (`/ip4/.../tcp/.../p2p/ID`) of peers to join; none starts a new swarm
        :param host_maddrs: where to listen; a random port on loopback by default, nowhere in client mode
        :param announce_maddrs: the addresses to tell others, if they differ from where we listen
        :param identity_path: file with the private key, made if it does not exist; a new peer id each time without
        :param client_mode: take part in the DHT without storing anything for others
        :param nat: ask the gateway to map the port, find relays, and probe whether we are reachable
        :param startup_timeout: seconds that one try to start the daemon may take

        Raises `BadRequest` for addresses that make no sense or a port in use, `Unreachable` if no initial peer
        answers, `SwarmError` if the daemon does not start.
        """
        initial_peers = [str(_checked(address, needs_peer=True)) for address in initial_peers]
        announce = [str(_checked(address, needs_port=True)) for address in announce_maddrs or ()]
        if host_maddrs is None and not client_mode:
            host_maddrs = LOOPBACK
        hosts = [str(_checked(address)) for address in host_maddrs or ()]
        _check_ports_free(hosts)
        identity, identity_file = _take_identity(identity_path)
        signatures = Signatures(identity)
        options: dict[str, Any] = {
            "initial_peers": initial_peers or None,
            "host_maddrs": hosts or None,
            "announce_maddrs": announce or None,
            "no_listen": not hosts,
            "identity_path": identity_file.name,
            "check_if_identity_free": False,  # it would start a second daemon; the lock tells on this machine
            "dht_mode": "client" if client_mode else "server",
            "auto_nat": nat,
            "nat_port_map": nat,
            "use_auto_relay": nat and bool(initial_peers),
            "idle_timeout": _ORPHAN_SECONDS,
            "startup_timeout": startup_timeout,
        }
        p2p: P2P | None = None
        try:
            p2p = await _start_daemon(options)
            dht = await DHTNode.create(
                p2p=p2p,
                initial_peers=initial_peers or None,
                client_mode=client_mode,
                record_validator=signatures,
                bootstrap_timeout=OPEN_SECONDS,
                cache_locally=False,
                cache_nearest=0,
                cache_on_store=False,
            )
        except BaseException as e:
            if p2p is not None:
                await p2p.shutdown()
            identity_file.close()
            if isinstance(e, RuntimeError) and "bootstrap failed" in str(e):
                raise _nobody_answers(initial_peers) from e
            raise
        dht.protocol.serializer = _TolerantSerializer
        signatures.guard(dht)
        remove_stale_sockets()
        if identity_path is None:
            identity_file.close()  # and so it is gone; the daemon has read it
        return cls(p2p, dht, signatures, identity_file)

    async def addresses(self) -> list[str]:
        """Full addresses (with `/p2p/ID`) under which this peer can be reached; none if it listens nowhere."""
        try:
            return [str(address) for address in await self.p2p.get_visible_maddrs(latest=True)]
        except ValueError:
            return []

    async def open(self, peer_id: PeerID | str, handler_name: str, *, within: float = OPEN_SECONDS) -> Channel:
        """Open a stream to a peer's handler. Raises `Unreachable` naming the peer, after `within` seconds at most."""
        peer = PeerID.from_base58(peer_id) if isinstance(peer_id, str) else peer_id
        try:
            async with asyncio.timeout(within):
                _, reader, writer = await self.p2p.call_binary_stream_handler(peer, handler_name)
        except TimeoutError as e:
            raise Unreachable(f"peer {peer} did not answer within {within:.0f} s", str(peer)) from e
        except (P2PDaemonError, OSError, asyncio.IncompleteReadError) as e:
            raise Unreachable(f"cannot reach peer {peer}: {_reason(e)}", str(peer)) from e
        return Channel(reader, writer, peer=f"peer {peer}")

    async def serve(self, handler_name: str, callback: StreamCallback) -> None:
        """Call `callback(channel, remote_peer_id)` for every stream that a peer opens to `handler_name`.

        The channel is closed when the callback ends, whatever happens in it; its errors are logged and stay there.
        """

        async def handle(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._handlers.add(task)
            channel = Channel(reader, writer, peer=f"peer {info.peer_id}")
            try:
                await callback(channel, info.peer_id)
            except LilliputError as e:
                log.info("%s with %s ended: %s", handler_name, channel.peer, e)
            except Exception:
                log.exception("%s with %s failed", handler_name, channel.peer)
            except asyncio.CancelledError:
                if not self._stopped:
                    raise
            finally:
                self._handlers.discard(task)
                channel.close()

        await self.p2p.add_binary_stream_handler(handler_name, handle)

    async def stop(self) -> None:
        """End all streams, leave the DHT, end the daemon. May be called twice."""
        if self._stopped:
            return
        self._stopped = True
        tasks = list(self._handlers)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_STOP_SECONDS)
        with contextlib.suppress(Exception):
            async with asyncio.timeout(_STOP_SECONDS):
                await self.dht.shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STOP_SECONDS):
                await self.p2p.shutdown()
        self._identity_file.close()


async def _start_daemon(options: dict[str, Any]) -> P2P:
    for attempt in range(1, STARTUP_ATTEMPTS + 1):
        try:
            return await _create(options)
        except P2PDaemonError as e:
            remove_stale_sockets()  # a daemon that fails leaves its own behind
            reason = _reason(e)
            nobody = "bootstrap peers" in reason
            if not nobody and "failed to start in" not in reason:
                raise SwarmError(f"the p2p daemon did not start: {reason}") from e
            if attempt == STARTUP_ATTEMPTS:
                if nobody:
                    raise _nobody_answers(options["initial_peers"]) from e
                raise SwarmError(
                    f"the p2p daemon did not start in {options['startup_timeout']:.0f} s, {attempt} times in a row; "
                    "is this machine overloaded? A longer startup timeout may help"
                ) from e
            log.info("the p2p daemon did not start (%s); trying again", reason)
            await asyncio.sleep(0.5)
        except (OSError, ValueError) as e:
            raise SwarmError(f"the p2p daemon did not start: {e}") from e
    raise AssertionError("unreachable")


async def _create(options: dict[str, Any]) -> P2P:
    """`P2P.create`, which leaves its daemon running when cancelled. This does not."""
    starting = asyncio.ensure_future(_create_in_turn(options))
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        await asyncio.wait({starting}, timeout=_STOP_SECONDS)
        if starting.done() and not starting.cancelled() and starting.exception() is None:
            await starting.result().shutdown()
        else:
            starting.cancel()
        raise


async def _create_in_turn(options: dict[str, Any]) -> P2P:
    """`P2P.create` beside those of other event loops in this process, only one of which uvloop lets fork at a time."""
    while True:
        try:
            return await P2P.create(**options)
        except RuntimeError as e:
            if "Racing with another loop" not in str(e):
                raise
            await asyncio.sleep(random.uniform(*_FORK_AGAIN_SECONDS))


def _nobody_answers(initial_peers: Sequence[str]) -> Unreachable:
    return Unreachable(
        f"none of the initial peers answers ({', '.join(initial_peers)}); "
        "are they running, and is the address (with the peer id at its end) right?"
    )


def _reason(error: BaseException) -> str:
    """What the daemon said, without its own date and prefix."""
    text = " ".join(str(error).split()) or type(error).__name__
    for prefix in ("Daemon failed to start: ", "Connect failed. msg="):
        text = text.removeprefix(prefix)
    words = text.split(" ", 2)
    return words[2] if len(words) == 3 and words[0].count("/") == 2 and words[0][:1].isdigit() else text


def _checked(address: str, *, needs_peer: bool = False, needs_port: bool = False) -> Multiaddr:
    example = "/ip4/192.0.2.1/tcp/31337" + ("/p2p/12D3Koo..." if needs_peer else "")
    try:
        parsed = Multiaddr(str(address))
        names = {protocol.name for protocol in parsed.protocols()}
        if needs_peer:
            PeerID.from_base58(parsed["p2p"])
    except Exception as e:  # the parser raises whatever comes to it
        raise BadRequest(f"{address!r} is not an address such as {example}") from e
    if not names & {"tcp", "udp", "p2p-circuit"}:
        raise BadRequest(f"{address!r} names no port; an address looks like {example}")
    if needs_port and any(name in names and parsed[name] == "0" for name in ("tcp", "udp")):
        raise BadRequest(f"an announced address needs its real port, not 0: {address!r}")
    return parsed


def _check_ports_free(host_maddrs: Sequence[str]) -> None:
    """The daemon would share a port that is taken with whoever has it, and get half of its connections."""
    for text in host_maddrs:
        address = Multiaddr(text)
        names = {protocol.name for protocol in address.protocols()}
        host = address["ip4"] if "ip4" in names else address["ip6"] if "ip6" in names else None
        kind, port_name = (socket.SOCK_STREAM, "tcp") if "tcp" in names else (socket.SOCK_DGRAM, "udp")
        port = int(address[port_name]) if port_name in names else 0
        if host is None or not 0 < port < 65536:
            continue
        family = socket.AF_INET6 if "ip6" in names else socket.AF_INET
        with contextlib.closing(socket.socket(family, kind)) as probe:
            if kind == socket.SOCK_STREAM:  # connections that linger after a restart are no obstacle
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as e:
                why = "is in use by another program" if e.errno == errno.EADDRINUSE else f"cannot be used: {e.strerror}"
                raise BadRequest(f"{text}: port {port} {why}") from e


def _take_identity(path: str | os.PathLike[str] | None) -> tuple[Identity, IO[bytes]]:
    """An identity, and the file in which the daemon finds it.

    A file that is given is taken for this process alone: two peers with one id break each other's connections.
    """
    if path is None:
        identity, passing = Identity.generate(), tempfile.NamedTemporaryFile(prefix="lilliput-key-")  # noqa: SIM115
        passing.write(identity.to_bytes())
        passing.flush()
        return identity, cast(IO[bytes], passing)
    name = os.fspath(path)
    try:
        if not os.path.exists(name):
            Identity.generate().write(name)
        file = open(name, "rb")  # noqa: SIM115 (held as long as the node lives)
    except OSError as e:
        raise BadRequest(f"cannot use the identity file {name}: {e.strerror or e}") from e
    try:
        identity = Identity.from_bytes(file.read())
    except (OSError, ValueError) as e:
        file.close()
        raise BadRequest(f"{name} is not an identity file") from e
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        file.close()
        raise BadRequest(f"the identity {name} is in use by another process") from e
    return identity, file
