"""`lilliput route`: through which servers a client of a model goes, and how long that takes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lilliput.cli import process
from lilliput.cli.language_model import NO_PEERS
from lilliput.cli.logs import Verbose
from lilliput.cli.options import InitialPeers, Model, Revision, SwarmKeyFile, Token, TrustedPeers
from lilliput.errors import BadRequest

if TYPE_CHECKING:
    from lilliput.client.route import Estimate, Hop
    from lilliput.client.trial import Timing


@dataclass(frozen=True)
class Route:
    """A chain for all blocks of a model, what was expected of it and what was measured."""

    model: str
    chain: list[Hop]
    expected: Estimate
    hops: list[Timing]
    whole: Timing

    def facts(self) -> dict[str, Any]:
        """Times in milliseconds for each token."""
        legs = [
            {
                "peer_id": hop.peer_id,
                "start": hop.start,
                "end": hop.end,
                "network_ms": {"expected": leg.network * 1e3, "measured": timing.network * 1e3},
                "compute_ms": {"expected": leg.compute * 1e3, "measured": timing.compute * 1e3},
            }
            for hop, leg, timing in zip(self.chain, self.expected.legs, self.hops, strict=True)
        ]
        total = {"expected": self.expected.total * 1e3, "measured": self.whole.total * 1e3}
        return {"model": self.model, "legs": legs, "total_ms": total}


def route(
    model: Model,
    initial_peers: InitialPeers = None,
    swarm_key: SwarmKeyFile = None,
    trusted_peers: TrustedPeers = None,
    revision: Revision = None,
    token: Token = None,
    json_lines: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    verbose: Verbose = 0,
) -> None:
    """Show through which servers a session would go, with what each leg is expected to take and what it takes.

    That is a session without push: each leg goes out from here and back, so it can be measured by itself.
    """
    process.prepare()
    if not initial_peers:
        raise BadRequest(NO_PEERS)
    with process.ending_at_once():
        from lilliput.collector import collector_paused

        with collector_paused():
            from lilliput.client.connection import SharedConnection
            from lilliput.client.remote import RemoteModel, trusted_set
            from lilliput.client.route import estimate
            from lilliput.client.trial import time_chain, time_hops
            from lilliput.models.sources import resolve
            from lilliput.swarm.membership import SwarmKey
    shared = SharedConnection.to(initial_peers, swarm_key=SwarmKey.of(swarm_key or None))
    try:
        files = resolve(model, revision=revision, token=token, weights=False)
        config = files.config()
        blocks = int(config["num_hidden_layers"])
        trusted = trusted_set(trusted_peers or ())
        remote = RemoteModel(
            shared.connection, files.name, blocks, files.fingerprint, push=False, trusted_peers=trusted
        )

        async def travel() -> Route:
            chain = await remote.chain(0, remote.blocks)
            measured = await shared.connection.round_trips([hop.record for hop in chain])
            expected = estimate(chain, round_trips=measured)
            width = int(config["hidden_size"])
            hops = await time_hops(remote, chain, width)
            return Route(files.name, chain, expected, hops, await time_chain(remote, chain, width))

        found = shared.run(travel())
    finally:
        shared.close()
    if json_lines:
        print(json.dumps(found.facts(), indent=2))
    else:
        _show(found)


def _show(found: Route) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    rate = f"{1 / found.whole.total:.1f} tokens/s"
    hops = "1 server" if len(found.chain) == 1 else f"{len(found.chain)} servers"
    console.print(Text.assemble((found.model, "bold"), f" over {hops}: ", (rate, "green")))
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("ms a token", no_wrap=True)
    table.add_column("blocks", no_wrap=True)
    for heading in ("network", "measured", "compute", "measured"):
        table.add_column(heading, justify="right", no_wrap=True)
    for hop, leg, timing in zip(found.chain, found.expected.legs, found.hops, strict=True):
        table.add_row(
            hop.peer_id[-8:],
            f"{hop.start}:{hop.end}",
            *(_short(t) for t in (leg.network, timing.network, leg.compute, timing.compute)),
        )
    compute = sum(leg.compute for leg in found.expected.legs)
    total = (found.expected.total - compute, found.whole.network, compute, found.whole.compute)
    table.add_row("all", f"{found.chain[0].start}:{found.chain[-1].end}", *(_short(t) for t in total), style="bold")
    console.print(table)


def _short(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"
