"""`lilliput simulate`: what placement and routing make of a swarm of thousands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lilliput.errors import BadRequest

if TYPE_CHECKING:
    from lilliput.cli.simulate.world import Result, Scenario

#: by how many blocks it has: a model's name, and gigabytes of one block at 4.5 bits a weight
_MODELS = {70: ("BLOOM, 176 billion", 1.39), 126: ("Llama 3.1, 405 billion", 1.79)}
_OTHER_BLOCK_GIGABYTES = 1.5
_SERVERS, _COVERAGE = 3000, 5.0


def simulate(
    servers: Annotated[
        int | None, typer.Option(min=1, max=100_000, help="How many, on average.", show_default="3000")
    ] = None,
    blocks: Annotated[
        list[int] | None,
        typer.Option(min=1, max=10_000, help="Of the model; may be repeated.", show_default="70 and 126"),
    ] = None,
    hours: Annotated[float, typer.Option(min=0.1, max=10_000, help="Of simulated time.")] = 6.0,
    departures: Annotated[
        float, typer.Option(min=0, max=10, help="Share of the servers that leave in an hour; as many join.")
    ] = 0.1,
    silent: Annotated[float, typer.Option(min=0, max=1, help="Share of those that leave without goodbye.")] = 0.5,
    coverage: Annotated[
        float | None,
        typer.Option(min=0.1, max=1000, help="As many servers as hold the model so often.", show_default="also 5"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of all chance.")] = 0,
    json_lines: Annotated[bool, typer.Option("--json", help="Print JSON.", show_default=False)] = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Also draw it, as SVG.", show_default=False)] = None,
) -> None:
    """Simulate a swarm: the real placement and routing, over records instead of machines."""
    from rich.console import Console
    from rich.progress import Progress

    from lilliput.cli.simulate.plot import write_plot
    from lilliput.cli.simulate.world import Scenario, World

    if plot is not None and not plot.absolute().parent.is_dir():
        raise BadRequest(f"there is no folder {plot.absolute().parent} for the plot")
    sizes: list[dict[str, Any]] = []
    if servers is not None or coverage is None:
        sizes.append({"servers": servers or _SERVERS})
    if coverage is not None or servers is None:
        sizes.append({"coverage": coverage or _COVERAGE})
    scenarios = [
        Scenario(
            count, _MODELS.get(count, ("", _OTHER_BLOCK_GIGABYTES))[1], hours,
            departures=departures, silent=silent, seed=seed, **size,
        )
        for size in sizes
        for count in blocks or _MODELS
    ]  # fmt: skip
    results = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for scenario in scenarios:
            task = progress.add_task(_name(scenario), total=1.0)
            if not progress.console.is_terminal:
                typer.echo(f"simulating {_name(scenario)}", err=True)
            world = World(scenario, lambda share, task=task: progress.update(task, completed=share))  # type: ignore[misc]
            results.append(world.run())
            progress.remove_task(task)
    if plot is not None:
        write_plot(plot, [(_name(s), r) for s, r in zip(scenarios, results, strict=True)])
    if json_lines:
        facts = [
            {"blocks": s.blocks, "hours": s.hours, "seed": s.seed, **r.facts()}
            for s, r in zip(scenarios, results, strict=True)
        ]
        print(json.dumps(facts, indent=2))
    else:
        _show(scenarios, results)


def _name(scenario: Scenario) -> str:
    size = f"coverage {scenario.coverage:g}" if scenario.coverage is not None else f"{scenario.servers:,} servers"
    return f"{scenario.blocks} blocks, {size}"


def _show(scenarios: list[Scenario], results: list[Result]) -> None:
    from rich.console import Console
    from rich.table import Table

    first = scenarios[0]
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 200
    console.print(
        f"{first.hours:g} hours, {first.departures:.0%} of the servers leave in an hour, {first.silent:.0%} of those "
        f"without goodbye; seed {first.seed}"
    )
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("")
    for scenario in scenarios:
        table.add_column(_name(scenario), justify="right")
    facts = [result.facts() for result in results]
    rows = {
        "servers, on average": [f"{f['servers']:,}" for f in facts],
        "model held so often (least)": [f"{f['coverage']:.1f} ({f['coverage_least']:.1f})" for f in facts],
        "joined / left": [f"{f['joins']:,} / {f['departures']:,}" for f in facts],
        "time with every block served": [f"{f['served_share_of_time']:.3%}" for f in facts],
        "fewest servers of a block": [str(f["holders_least"]) for f in facts],
        "throughput, of the optimum": [f"{f['throughput_share']:.1%}" for f in facts],
        "  at the worst moment": [f"{f['throughput_share_least']:.1%}" for f in facts],
        "moves a server and hour": [f"{f['moves_per_server_and_hour']:.2f}" for f in facts],
        "servers in a route": ["-" if f["hops"] is None else f"{f['hops']:.1f}" for f in facts],
        "a route takes, ms (most)": [
            "-" if f["route_ms"] is None else f"{f['route_ms']:.0f} ({f['route_ms_most']:.0f})" for f in facts
        ],
    }
    for name, cells in rows.items():
        table.add_row(name, *cells)
    console.print(table)
