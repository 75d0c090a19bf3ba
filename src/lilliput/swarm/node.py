"""One peer of the swarm: a p2p daemon, a DHT node, and streams to and from other peers.

All of it lives on the event loop that starts it; nothing is forked. The daemon is a child process that ends as soon as
the connection that this process keeps open to it ends, so it never outlives its owner, however that one dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import IO, Any

from hivemind.dht import DHTNode
from hivemind.dht.protocol import ValidationError
from hivemind.p2p import P2P, P2PDaemonError, PeerID
from hivemind.utils import MSGPackSerializer

from lilliput.errors import Busy, LilliputError, SwarmError, Unauthorized, Unreachable
from lilliput.swarm.addresses import check_ports_free, checked
from lilliput.swarm.allowance import Allowances
from lilliput.swarm.callers import CallersP2P
from lilliput.swarm.daemon import STARTUP_SECONDS, STOP_SECONDS, nobody_answers, reason_of, start_daemon
from lilliput.swarm.identity import take_identity
from lilliput.swarm.keepers import Keepers
from lilliput.swarm.membership import introduce, welcome
from lilliput.swarm.sealed import SealedP2P
from lilliput.swarm.signatures import Signatures
from lilliput.swarm.sockets import remove_stale_sockets
from lilliput.swarm.storage import guard
from lilliput.swarm.swarm_key import NotAMember, SwarmKey
from lilliput.wire import lilliput_pb2 as pb
from lilliput.wire.channel import Channel, error_message, error_of
from lilliput.wire.limits import PEER_BURST_SECONDS, PEER_BYTES_PER_SECOND
from lilliput.wire.protocol import PING

log = logging.getLogger(__name__)

StreamCallback = Callable[[Channel, PeerID], Awaitable[None]]

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
OPEN_SECONDS = 10.0
#: where those who are there are too busy to let us in, it is tried so often
_JOIN_ATTEMPTS = 3
#: a daemon that nobody connects to (we were killed while it started) ends by itself after this long
_ORPHAN_SECONDS = 20.0
#: so many streams may one peer have open here; those of hivemind's own calls are not counted
MOST_STREAMS = 256
#: who was refused by all bootstrap peers asks them why, for so long in all (seconds)
_WHY_SECONDS = 10.0
#: who has too many is told to come back after so long (seconds)
_STREAM_WAIT_SECONDS = 1.0


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
        key: of a private swarm; None in a public one
        lease_ends: until when each of this node's DHT entries was last announced (see `directory`)
    """

    def __init__(
        self,
        p2p: P2P,
        dht: DHTNode,
        signatures: Signatures,
        identity_file: IO[bytes],
        key: SwarmKey | None,
        peer_rate: float = PEER_BYTES_PER_SECOND,
    ) -> None:
        self.p2p, self.dht, self.signatures = p2p, dht, signatures
        self.peer_id: PeerID = p2p.peer_id
        self.key = key
        self.lease_ends: dict[tuple[str, str], float] = {}
        self._keepers: dict[str, Keepers] = {}
        self._bytes = Allowances(peer_rate, PEER_BURST_SECONDS * peer_rate)
        self._streams: Counter[str] = Counter()
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
        relays: Sequence[str] | None = None,
        swarm_key: SwarmKey | str | os.PathLike[str] | None = None,
        peer_rate: float = PEER_BYTES_PER_SECOND,
        startup_timeout: float = STARTUP_SECONDS,
    ) -> Node:
        """Start a daemon and join the swarm.

        :param initial_peers: full addresses (`/ip4/.../tcp/.../p2p/ID`) of peers to join; none starts a new swarm
        :param host_maddrs: where to listen; a random port on loopback by default, nowhere in client mode
        :param announce_maddrs: the addresses to tell others, if they differ from where we listen
        :param identity_path: file with the private key, made if it does not exist; a new peer id each time without
        :param client_mode: take part in the DHT without storing anything for others
        :param nat: ask the gateway to map the port, find relays, and probe whether we are reachable
        :param relays: be reachable only through these peers, which must be reachable themselves; if empty, through
            the initial peers
        :param swarm_key: of a private swarm, or the file that holds it; only members are spoken to
        :param peer_rate: bytes a second that one peer may send; past that it is read more slowly
        :param startup_timeout: seconds that one try to start the daemon may take

        Raises `BadRequest` for addresses that make no sense or a port in use, `Unreachable` if no initial peer
        answers, `Unauthorized` if they refuse us, `SwarmError` if the daemon does not start.
        """
        key = SwarmKey.of(swarm_key)
        initial_peers = [str(checked(address, needs_peer=True)) for address in initial_peers]
        announce = [str(checked(address, needs_port=True)) for address in announce_maddrs or ()]
        if host_maddrs is None and not client_mode:
            host_maddrs = LOOPBACK
        hosts = [str(checked(address)) for address in host_maddrs or ()]
        check_ports_free(hosts)
        identity, identity_file = take_identity(identity_path)
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
            "use_auto_relay": (nat or relays is not None) and bool(initial_peers),
            "force_reachability": None if relays is None else "private",
            "trusted_relays": [str(checked(address, needs_peer=True)) for address in relays or ()] or None,
            "idle_timeout": _ORPHAN_SECONDS,
            "startup_timeout": startup_timeout,
        }
        try:
            for attempt in range(_JOIN_ATTEMPTS, 0, -1):
                try:
                    p2p, dht = await _join(options, key, signatures, client_mode)
                    break
                except _Late as e:
                    if attempt == 1:
                        raise SwarmError(f"{e}, {_JOIN_ATTEMPTS} times in a row") from e
                    log.info("%s; trying again", e)
        except BaseException:
            identity_file.close()
            raise
        dht.protocol.serializer = _TolerantSerializer
        guard(dht)
        remove_stale_sockets()
        if identity_path is None:
            identity_file.close()  # and so it is gone; the daemon has read it
        return cls(p2p, dht, signatures, identity_file, key, peer_rate)

    def keepers(self, key: str) -> Keepers:
        """Of a key of the DHT."""
        if key not in self._keepers:
            self._keepers[key] = Keepers(self.dht, self.signatures, key)
        return self._keepers[key]

    async def addresses(self) -> list[str]:
        """Full addresses (with `/p2p/ID`) under which this peer can be reached; none if it listens nowhere.

        Those of this machine alone come last.
        """
        try:
            found = [str(address) for address in await self.p2p.get_visible_maddrs(latest=True)]
            return sorted(found, key=lambda address: address.startswith(("/ip4/127.", "/ip6/::1/")))
        except ValueError:
            return []

    async def open(self, peer_id: PeerID | str, handler_name: str, *, within: float = OPEN_SECONDS) -> Channel:
        """Open a stream to a peer's handler. In a private swarm, both ends are members when it is open.

        Raises `Unreachable` naming the peer, after `within` seconds at most, or `Unauthorized` if it refuses us.
        """
        peer = PeerID.from_base58(peer_id) if isinstance(peer_id, str) else peer_id
        return await _open(self.p2p, self.key, peer, handler_name, within)

    async def serve(self, handler_name: str, callback: StreamCallback) -> None:
        """Call `callback(channel, remote_peer_id)` for every stream that a peer opens to `handler_name`.

        The channel is closed when the callback ends, whatever happens in it; its errors are logged and stay there. One
        of Lilliput's is the last that the peer hears.
        """

        async def answer(channel: Channel, peer: PeerID) -> None:
            try:
                if self._streams[str(peer)] > MOST_STREAMS:
                    raise Busy(f"you have {MOST_STREAMS} streams to this peer already", _STREAM_WAIT_SECONDS)
                if self.key is not None:
                    await welcome(self.key, channel, handler_name, self.peer_id, peer)
                await callback(channel, peer)
            except LilliputError as e:
                log.info("%s with %s ended: %s", handler_name, channel.peer, e)
                channel.post(error_message(e, closed=True))
                await channel.hear_out()

        async def handle(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._handlers.add(task)
            peer = str(info.peer_id)
            self._streams[peer] += 1
            channel = Channel(reader, writer, peer=f"peer {peer}")
            channel.pace = self._bytes.of(peer).take
            try:
                await answer(channel, info.peer_id)
            except Exception:
                log.exception("%s with %s failed", handler_name, channel.peer)
            except asyncio.CancelledError:
                if not self._stopped:
                    raise
            finally:
                self._handlers.discard(task)
                self._streams[peer] -= 1
                if not self._streams[peer]:
                    del self._streams[peer]
                channel.close()

        await self.p2p.add_binary_stream_handler(handler_name, handle)

    async def received(self, peer_id: PeerID, count: int) -> None:
        """So many bytes came from a peer by another way than `serve`; returns when it may send more."""
        await asyncio.sleep(self._bytes.of(str(peer_id)).take(count))

    async def lost(self) -> None:
        """Return when the daemon has ended, though nobody has told it to: nothing comes or goes any more."""
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_unix_connection(self.p2p.daemon_listen_maddr["unix"])
            try:
                await reader.read(1)  # it says nothing unasked
            finally:
                writer.close()

    async def stop(self) -> None:
        """End all streams, leave the DHT, end the daemon. May be called twice."""
        if self._stopped:
            return
        self._stopped = True
        tasks = list(self._handlers)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=STOP_SECONDS)
        with contextlib.suppress(Exception):
            async with asyncio.timeout(STOP_SECONDS):
                await self.dht.shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_SECONDS):
                await self.p2p.shutdown()
        self._identity_file.close()


async def _open(p2p: P2P, key: SwarmKey | None, peer: PeerID, handler_name: str, within: float) -> Channel:
    try:
        async with asyncio.timeout(within):
            _, reader, writer = await p2p.call_binary_stream_handler(peer, handler_name)
            channel = Channel(reader, writer, peer=f"peer {peer}")
            if key is not None:
                try:
                    await introduce(key, channel, handler_name, p2p.peer_id, peer)
                except BaseException:
                    channel.close()
                    raise
            return channel
    except TimeoutError as e:
        raise Unreachable(f"peer {peer} did not answer within {within:.0f} s", str(peer)) from e
    except (P2PDaemonError, OSError, asyncio.IncompleteReadError) as e:
        raise Unreachable(f"cannot reach peer {peer}: {reason_of(e)}", str(peer)) from e


class _Late(SwarmError):
    """Those who are there take too long to let us in."""


async def _join(
    options: dict[str, Any], key: SwarmKey | None, signatures: Signatures, client_mode: bool
) -> tuple[P2P, DHTNode]:
    p2p = await start_daemon(options, SealedP2P if key else CallersP2P)
    if isinstance(p2p, SealedP2P) and key:
        p2p.key = key
    initial_peers = options["initial_peers"]
    try:
        try:
            dht = await DHTNode.create(
                p2p=p2p,
                initial_peers=initial_peers,
                client_mode=client_mode,
                record_validator=signatures,
                bootstrap_timeout=OPEN_SECONDS,
                cache_locally=False,
                cache_nearest=0,
                cache_on_store=False,
            )
        except ValidationError as e:
            if "access" in str(e):  # it has called us back, and got no answer in time
                raise _Late(f"the swarm does not take us: {e}") from e
            raise SwarmError(f"the swarm does not take us: {e} (set the clocks: timedatectl set-ntp true)") from e
        except RuntimeError as e:
            if "bootstrap failed" in str(e):
                raise await _why_refused(p2p, key, initial_peers) from e
            raise
    except BaseException:
        await p2p.shutdown()
        raise
    return p2p, dht


async def _why_refused(p2p: P2P, key: SwarmKey | None, initial_peers: Sequence[str]) -> LilliputError:
    """Why no initial peer let us join: they may be gone, or not want us, or not be whom we look for."""
    why: LilliputError = nobody_answers(initial_peers)

    async def ask(peer: PeerID) -> None:
        nonlocal why
        try:
            channel = await _open(p2p, key, peer, PING, _WHY_SECONDS)
            await channel.send(pb.Message(ping=pb.Ping()))
            received = await channel.receive()
            channel.close()
            if received is not None and isinstance(received.body, pb.Error):
                raise error_of(received.body)
            if received is not None and isinstance(why, Unreachable) and not isinstance(why, NotAMember):
                why = _Late("the initial peers are there, but too busy to let us join in time")
        except Unauthorized as e:
            why = e
        except NotAMember as e:
            if not isinstance(why, Unauthorized):
                why = e
        except LilliputError:
            pass

    asking = [asyncio.create_task(ask(PeerID.from_base58(checked(address)["p2p"]))) for address in initial_peers]
    try:
        await asyncio.wait(asking, timeout=_WHY_SECONDS)
    finally:
        for task in asking:
            task.cancel()
    return why
