"""`lilliput doctor`: what keeps this machine from taking part in a swarm, and what to do about it."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import socket
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from lilliput.cli import process
from lilliput.cli.logs import Verbose
from lilliput.cli.options import Announce, AnyInitialPeers, AnySwarmKeyFile, Host, Port, listen_address
from lilliput.errors import LilliputError

if TYPE_CHECKING:
    from lilliput.swarm.node import Node
    from lilliput.swarm.swarm_key import SwarmKey

#: clocks that differ by more than this are worth a word (seconds); hivemind takes no more than 3
_CLOCK_SECONDS = 1.0
_LOW_BYTES = 2 << 30
#: of the peers that could dial back, so many are asked
_MOST_ASKED = 3
_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, what was found, and what to do if it is not well."""

    state: Literal["ok", "warn", "fail"]
    what: str
    found: str


def doctor(
    model: Annotated[
        str | None, typer.Argument(help="Also look whether its files are here.", show_default=False)
    ] = None,
    initial_peers: AnyInitialPeers = None,
    swarm_key: AnySwarmKeyFile = None,
    host: Host = "0.0.0.0",
    port: Port = 0,
    announce: Announce = None,
    json_lines: Annotated[bool, typer.Option("--json", help="Print one JSON line for each finding.")] = False,
    verbose: Verbose = 0,
) -> None:
    """Tell whether this machine can take part in a swarm and be reached from outside, or why not and what to do.

    Name the --port that you want to serve on. If a server runs there already, that one is tried. Needs no internet.
    """
    process.prepare()
    with process.ending_at_once():
        from lilliput.collector import collector_paused

        with collector_paused():
            from lilliput.swarm.loop import new_event_loop

    async def examine() -> bool:
        well = True
        async for finding in _examine(model, initial_peers or (), swarm_key or None, host, port, announce or ()):
            well = well and finding.state != "fail"
            if json_lines:
                print(json.dumps(asdict(finding)), flush=True)
            else:
                typer.echo(
                    f"{typer.style(f'{finding.state:4}', fg=_COLOURS[finding.state])}  {finding.what}: {finding.found}"
                )
        return well

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        if not runner.run(examine()):
            raise typer.Exit(1)


async def _examine(
    model: str | None, peers: Sequence[str], key_file: str | None, host: str, port: int, announce: Sequence[str]
) -> AsyncIterator[Finding]:
    from lilliput.swarm.swarm_key import SwarmKey

    for finding in _machine(model):
        yield finding
    key: SwarmKey | None = None
    if key_file:
        yield _key(key_file)
        try:
            key = SwarmKey.read(key_file)
        except LilliputError:
            return
    listening = _listening(host, port)
    yield listening
    reached: list[str] = []
    for address in peers:
        finding = await _peer(address, key)
        yield finding
        if finding.state == "ok":
            reached.append(address)
    if not peers:
        yield Finding(
            "warn", "swarm", "name a member with --initial-peers: only others can tell whether you are reached"
        )
    if reached:
        async for finding in _swarm(reached, key, host, port if listening.state != "fail" else 0, port, announce):
            yield finding


def _key(file: str) -> Finding:
    """A swarm's key, and whether it is for its owner alone."""
    from lilliput.swarm.swarm_key import SwarmKey

    try:
        name = SwarmKey.read(file).name
    except LilliputError as e:
        return Finding("fail", "swarm key", str(e))
    if Path(file).expanduser().stat().st_mode & 0o077:
        return Finding("warn", "swarm key", f"{name}; others on this machine may read it: chmod 600 {file}")
    return Finding("ok", "swarm key", f"{name}; every member should see the same here")


def _machine(model: str | None) -> list[Finding]:
    """Memory, disk, and a model's files."""
    import psutil

    memory = psutil.virtual_memory().available
    found = [
        Finding("ok" if memory > _LOW_BYTES else "warn", "memory", f"{memory / 2**30:.1f} GiB free"),
    ]
    home = Path.home()
    place = next(folder for folder in (home, *home.absolute().parents) if folder.is_dir())  # it will be made there
    disk = psutil.disk_usage(str(place)).free
    found.append(Finding("ok" if disk > _LOW_BYTES else "warn", "disk", f"{disk / 2**30:.1f} GiB free in {place}"))
    if model:
        from lilliput.models.sources import resolve

        try:
            files = resolve(model, weights=False)
            found.append(Finding("ok", "model", f"{files.name}, {files.blocks} blocks, in {files.path}"))
        except LilliputError as e:
            found.append(Finding("fail", "model", str(e)))
    return found


def _listening(host: str, port: int) -> Finding:
    """Whether the port can be taken."""
    from lilliput.swarm.addresses import check_ports_free

    if not port:
        return Finding("warn", "port", "a free one is taken; to open one in a firewall, choose it with --port")
    try:
        check_ports_free([listen_address(host, port)])
    except LilliputError as e:
        return Finding("warn", "port", f"{e}; if that is your server, it is the one tried below")
    return Finding("ok", "port", f"TCP port {port} is free")


async def _peer(address: str, key: SwarmKey | None) -> Finding:
    """Whether a member can be dialled, is who it should be, and takes us."""
    from lilliput.errors import Unauthorized
    from lilliput.swarm import dial_back
    from lilliput.swarm.addresses import checked, host_and_port
    from lilliput.swarm.node import Node

    what = f"peer {address}"
    place: tuple[str, int] | None = None
    try:
        place = host_and_port(checked(address, needs_peer=True))
        if place and (why := await dial_back.dial(*place)):
            return Finding("fail", what, f"{why}. Does it run, and is this its address?")
        node = await Node.start([address], client_mode=True, swarm_key=key)
        await node.stop()
    except Unauthorized as e:
        return Finding("fail", what, str(e))
    except LilliputError as e:
        wrong = (
            ""
            if place is None or "key" in str(e) or "clock" in str(e)
            else (
                "; somebody answers there, but not as the peer with the id at the address's end: copy the address anew"
            )
        )
        return Finding("fail", what, f"{e}{wrong}")
    return Finding("ok", what, "answers and takes us")


async def _swarm(
    peers: Sequence[str], key: SwarmKey | None, host: str, free_port: int, port: int, announce: Sequence[str]
) -> AsyncIterator[Finding]:
    """What the others see of us."""
    from lilliput.swarm.node import Node

    taken = bool(port) and _listening(host, port).state == "warn"
    node = await Node.start(
        peers,
        host_maddrs=[listen_address(host, 0 if taken else free_port)],
        announce_maddrs=announce or None,
        swarm_key=key,
    )
    try:
        own = [address.rpartition("/p2p/")[0] for address in await node.addresses()]
        if taken:  # a server of ours listens there
            own = list(announce) or [_with_port(address, port) for address in own]
        yield Finding("ok", "own addresses", ", ".join(f"{address} ({_kind(address)})" for address in own))
        async for finding in _dialled_back(node, peers, own):
            yield finding
        yield await _versions(node)
    finally:
        await node.stop()


async def _dialled_back(node: Node, peers: Sequence[str], own: Sequence[str]) -> AsyncIterator[Finding]:
    from lilliput.swarm import dial_back
    from lilliput.swarm.addresses import checked

    for address in peers[:_MOST_ASKED]:
        peer = checked(address)["p2p"]
        try:
            seen = await dial_back.ask(node, peer, own)
        except (LilliputError, TimeoutError) as e:
            yield Finding("warn", f"asked {peer[-8:]}", f"it cannot say whether it reaches us: {e}")
            continue
        if abs(seen.clock) > _CLOCK_SECONDS + seen.round_trip / 2:
            side = "ahead of" if seen.clock < 0 else "behind"
            text = f"this machine's is {abs(seen.clock):.1f} s {side} {peer[-8:]}'s: timedatectl set-ntp true"
            yield Finding("fail", "clock", text)
        else:
            yield Finding("ok", "clock", f"within {max(abs(seen.clock), seen.round_trip / 2):.2f} s of {peer[-8:]}'s")
        for tried, why in seen.outcomes.items():
            yield Finding("fail" if why else "ok", f"dialled by {peer[-8:]}", why or f"it reaches us at {tried}")
        if not seen.outcomes:
            yield Finding("fail", f"dialled by {peer[-8:]}", _not_tried(seen.seen_at, own))


def _not_tried(seen_at: str, own: Sequence[str]) -> str:
    if not seen_at:
        return "it sees us over a relay only: nobody can dial this machine; serve with --relay, or open a port"
    port = next((address.split("/tcp/")[1].split("/")[0] for address in own if "/tcp/" in address), "31337")
    return (
        f"it sees us come from {seen_at}, which is none of our addresses: a router stands in between. Have it pass TCP "
        f"port {port} on to this machine and serve with --port {port} --announce /ip4/{seen_at}/tcp/{port}, "
        "or serve with --nat or --relay"
    )


async def _versions(node: Node) -> Finding:
    import lilliput
    from lilliput.swarm import directory

    try:
        models = await directory.models(node)
        records = [record for name in models for record in await directory.find(node, name)]
    except LilliputError as e:
        return Finding("warn", "servers", str(e))
    others = sorted({record.version or "?" for record in records} - {lilliput.__version__})
    counted = f"{len(records)} with blocks of {len(models)} {'model' if len(models) == 1 else 'models'}"
    text = f"{counted}; version {lilliput.__version__}"
    if others:
        return Finding("warn", "servers", f"{text} here, but some have {', '.join(others)}: use one version everywhere")
    return Finding("ok", "servers", f"{text} everywhere")


def _with_port(address: str, port: int) -> str:
    return "/".join([*address.split("/")[:-1], str(port)])


def _kind(address: str) -> str:
    """Who can reach it, as far as the number tells."""
    from hivemind.utils.multiaddr import Multiaddr

    from lilliput.swarm.addresses import host_and_port

    place = host_and_port(Multiaddr(address))
    if place is None:
        return "a relay or another transport"
    try:
        ip = ipaddress.ip_address(socket.gethostbyname(place[0]) if not place[0][0].isdecimal() else place[0])
    except (ValueError, OSError):
        return "a name"
    return "this machine only" if ip.is_loopback else "your own network only" if ip.is_private else "public"
