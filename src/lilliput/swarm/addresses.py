"""Addresses of peers, as libp2p writes them."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from lilliput.errors import BadRequest

if TYPE_CHECKING:  # hivemind takes seconds, and the command line wants to know at once what is no address
    from hivemind.utils.multiaddr import Multiaddr

_BASE58 = frozenset("123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz")


def _example(needs_peer: bool) -> str:
    return "/ip4/192.0.2.1/tcp/31337" + ("/p2p/12D3Koo..." if needs_peer else "")


def check_form(address: str, *, needs_peer: bool = False) -> None:
    """Raise `BadRequest` for what cannot be an address; `checked` is exact."""
    example = _example(needs_peer)
    first, *parts = str(address).split("/")
    if first or len(parts) < 2:
        raise BadRequest(f"{address!r} is not an address such as {example}")
    if needs_peer and not {"p2p", "ipfs"} & set(parts):
        raise BadRequest(f"{address!r} lacks the peer's id; an address looks like {example}")
    if any(set(peer) - _BASE58 for name, peer in pairwise(parts) if name == "p2p"):
        raise BadRequest(f"{address!r} is not an address such as {example}: the peer's id is not whole")
    if not {"tcp", "udp", "p2p-circuit"} & set(parts):
        raise BadRequest(f"{address!r} names no port; an address looks like {example}")


def checked(address: str, *, needs_peer: bool = False, needs_port: bool = False) -> Multiaddr:
    """An address, parsed. Raises `BadRequest` for anything else."""
    from hivemind.p2p import PeerID
    from hivemind.utils.multiaddr import Multiaddr

    check_form(address, needs_peer=needs_peer)
    try:
        parsed = Multiaddr(str(address))
        names = {protocol.name for protocol in parsed.protocols()}
        if needs_peer:
            PeerID.from_base58(parsed["p2p"])
    except Exception as e:  # the parser raises whatever comes to it
        raise BadRequest(f"{address!r} is not an address such as {_example(needs_peer)}") from e
    if needs_port and any(name in names and parsed[name] == "0" for name in ("tcp", "udp")):
        raise BadRequest(f"an announced address needs its real port, not 0: {address!r}")
    return parsed


def check_ports_free(host_maddrs: Sequence[str]) -> None:
    """Raises `BadRequest` if others listen there.

    The daemon would share a port that is taken with whoever has it, and get half of its connections.
    """
    from hivemind.utils.multiaddr import Multiaddr

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


def host_and_port(address: Multiaddr) -> tuple[str, int] | None:
    """Where an address leads by plain TCP; None if it does not: by another transport, or over a relay."""
    names = [protocol.name for protocol in address.protocols()]
    host = next((name for name in ("ip4", "ip6", "dns", "dns4", "dns6") if name in names), None)
    if host is None or "tcp" not in names or "p2p-circuit" in names:
        return None
    return str(address[host]), int(address["tcp"])
