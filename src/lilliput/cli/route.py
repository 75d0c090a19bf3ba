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


@dataclass(frozen=True)
class Way:
    """Over a chain in one way or the other: what it is expected to take of a token and what it took, in seconds.

    :ivar networks: measured, one for each server
    """

    expected: Estimate
    networks: list[float]
    back: float = 0.0

    @property
    def network(self) -> tuple[float, float]:
        """Expected and measured, of the whole chain."""
        return sum(leg.network for leg in self.expected.legs) + self.expected.back, sum(self.networks) + self.back


@dataclass(frozen=True)
class Route:
    """A chain for all blocks of a model.

    :ivar pushed: each server sends straight to the next
    :ivar carried: everything returns to the client
    :ivar computes: of each server, measured
    """

    model: str
    chain: list[Hop]
    pushed: Way
    carried: Way
    computes: list[float]

    @property
    def compute(self) -> tuple[float, float]:
        return sum(leg.compute for leg in self.pushed.expected.legs), sum(self.computes)

    def total(self, way: Way) -> tuple[float, float]:
        """Expected and measured."""
        (network, network_took), (compute, compute_took) = way.network, self.compute
        return network + compute, network_took + compute_took

    def facts(self) -> dict[str, Any]:
        """Times in milliseconds for each token."""
        legs = [
            {
                "peer_id": hop.peer_id,
                "name": hop.record.name,
                "start": hop.start,
                "end": hop.end,
                "pushed_ms": _ms(self.pushed.expected.legs[number].network, self.pushed.networks[number]),
                "carried_ms": _ms(self.carried.expected.legs[number].network, self.carried.networks[number]),
                "compute_ms": _ms(self.pushed.expected.legs[number].compute, self.computes[number]),
            }
            for number, hop in enumerate(self.chain)
        ]
        return {
            "model": self.model,
            "legs": legs,
            "back_ms": _ms(self.pushed.expected.back, self.pushed.back),
            "total_ms": {"pushed": _ms(*self.total(self.pushed)), "carried": _ms(*self.total(self.carried))},
        }


def _ms(expected: float, measured: float) -> dict[str, float]:
    return {"expected": expected * 1e3, "measured": measured * 1e3}


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

    Pushed: each server sends what it computed straight to the next one, as sessions do where servers can reach one
    another. Carried: everything returns here in between, as where they cannot.
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
            from lilliput.client.trial import time_hops, time_pushed
            from lilliput.models.sources import resolve
            from lilliput.swarm.swarm_key import SwarmKey
    shared = SharedConnection.to(initial_peers, swarm_key=SwarmKey.of(swarm_key or None))
    try:
        files = resolve(model, revision=revision, token=token, weights=False)
        trusted = trusted_set(trusted_peers or ())
        remote = RemoteModel(shared.connection, files.name, files.blocks, files.fingerprint, trusted_peers=trusted)

        async def travel() -> Route:
            chain = await remote.chain(0, remote.blocks, pushes=True)
            measured = await shared.connection.round_trips([hop.record for hop in chain])
            width = files.hidden_size
            hops = await time_hops(remote, chain, width)
            *networks, back = await time_pushed(remote, chain, width, hops)
            return Route(
                files.name,
                chain,
                Way(estimate(chain, round_trips=measured, pushes=True), networks, back),
                Way(estimate(chain, round_trips=measured), [timing.network for timing in hops]),
                [timing.compute for timing in hops],
            )

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
    rate = f"{1 / found.total(found.pushed)[1]:.1f} tokens/s"
    carried = f" (carried: {1 / found.total(found.carried)[1]:.1f})"
    hops = "1 server" if len(found.chain) == 1 else f"{len(found.chain)} servers"
    console.print(Text.assemble((found.model, "bold"), f" over {hops}: ", (rate, "green"), carried))
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("ms a token", no_wrap=True)
    table.add_column("blocks", no_wrap=True)
    for heading in ("pushed", "measured", "carried", "measured", "compute", "measured"):
        table.add_column(heading, justify="right", no_wrap=True)
    for number, hop in enumerate(found.chain):
        leg, carried_leg = found.pushed.expected.legs[number], found.carried.expected.legs[number]
        times = (
            *(leg.network, found.pushed.networks[number]),
            *(carried_leg.network, found.carried.networks[number]),
            *(leg.compute, found.computes[number]),
        )
        table.add_row(Text(hop.record.name or hop.peer_id[-8:]), f"{hop.start}:{hop.end}", *map(_short, times))
    table.add_row("and back", "", _short(found.pushed.expected.back), _short(found.pushed.back))
    total = (*found.pushed.network, *found.carried.network, *found.compute)
    table.add_row("all", f"{found.chain[0].start}:{found.chain[-1].end}", *map(_short, total), style="bold")
    console.print(table)


def _short(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"
