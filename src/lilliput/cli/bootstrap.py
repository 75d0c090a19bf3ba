"""`lilliput bootstrap`: a peer that others join through, and nothing else."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from lilliput.cli import process
from lilliput.cli.logs import LogJson, Verbose
from lilliput.cli.options import (
    Announce,
    Host,
    IdentityFile,
    InitialPeers,
    Nat,
    Port,
    Relay,
    SwarmKeyFile,
    listen_address,
)


def bootstrap(
    initial_peers: InitialPeers = None,
    swarm_key: SwarmKeyFile = None,
    host: Host = "0.0.0.0",
    port: Port = 31337,
    announce: Announce = None,
    identity: IdentityFile = None,
    nat: Nat = False,
    relay: Relay = None,
    json_line: Annotated[
        bool, typer.Option("--json", help="When ready, print one JSON line instead of words.", show_default=False)
    ] = False,
    log_json: LogJson = False,
    verbose: Verbose = 0,
) -> None:
    """Be a peer that others join the swarm through, until Ctrl-C. It holds no blocks.

    With --identity its address stays the same over restarts. Run two or three on different machines, each with the
    others as --initial-peers: a swarm outlives any of them, and whoever joins may name them all.
    """
    process.prepare()
    with process.ending_at_once():
        from lilliput.collector import collector_paused

        with collector_paused():
            from lilliput.swarm.loop import new_event_loop
            from lilliput.swarm.swarm_key import SwarmKey
    options: dict[str, Any] = {
        "host_maddrs": [listen_address(host, port)],
        "announce_maddrs": announce,
        "identity_path": identity,
        "nat": nat,
        "relays": relay or None,
        "swarm_key": SwarmKey.of(swarm_key or None),
    }
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        signum = runner.run(_serve(initial_peers or (), options, json_line))
    raise SystemExit(128 + signum)


async def _serve(initial_peers: Sequence[str], options: dict[str, Any], json_line: bool) -> int:
    """Until a signal comes; returns it."""
    from lilliput.swarm.daemon import daemon_ended
    from lilliput.swarm.node import Node
    from lilliput.swarm.peer_calls import serve_peers

    loop = asyncio.get_running_loop()
    signalled: asyncio.Future[int] = loop.create_future()

    def note(number: int) -> None:
        if not signalled.done():
            signalled.set_result(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, note, number)
    starting = asyncio.ensure_future(Node.start(initial_peers, **options))
    waiting: set[asyncio.Future[Any]] = {starting, signalled}
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        return await signalled
    node = await starting
    try:
        await serve_peers(node)
        _tell(await node.addresses(), str(node.peer_id), json_line)
        lost = asyncio.ensure_future(node.lost())
        waiting = {lost, signalled}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if not signalled.done():
            raise daemon_ended()
        lost.cancel()
        return await signalled
    finally:
        await node.stop()


def _tell(addresses: Sequence[str], peer_id: str, json_line: bool) -> None:
    if json_line:
        print(json.dumps({"pid": os.getpid(), "peer_id": peer_id, "addresses": list(addresses)}), flush=True)
        return
    typer.echo("Others join with one of")
    for address in addresses:
        typer.echo(f"  --initial-peers {address}")
