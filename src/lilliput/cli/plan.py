"""`lilliput plan`: what a model needs, before anything large is fetched."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from lilliput.cli.logs import Verbose
from lilliput.cli.options import Model, Revision, Token, parse_size
from lilliput.cli.progress import drawn

if TYPE_CHECKING:
    from lilliput.models.facts import ModelFacts
    from lilliput.models.plan import Estimate, Machine


def plan(
    model: Model = "smollm2",
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Of one machine, as in 8GB.", show_default="what is free here"),
    ] = None,
    machines: Annotated[
        int | None, typer.Option(min=1, help="How many machines share the model.", show_default="as few as hold it")
    ] = None,
    round_trip: Annotated[float, typer.Option(min=0, metavar="MS", help="Between two of them, in ms.")] = 20.0,
    context: Annotated[int, typer.Option(min=32, help="Tokens a conversation may have.")] = 2048,
    sessions: Annotated[int, typer.Option(min=1, help="Conversations of that length whose caches must fit.")] = 4,
    bandwidth: Annotated[
        float | None,
        typer.Option(min=0.1, metavar="GB/S", help="How fast a machine reads memory.", show_default="measured here"),
    ] = None,
    revision: Revision = None,
    token: Token = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.", show_default=False)] = False,
    verbose: Verbose = 0,
) -> None:
    """Say how much of a model fits a machine, and how many machines hold it. Fetches no weights, only their headers."""
    size = parse_size(memory, "--memory") if memory else None
    from lilliput.models import machine as here
    from lilliput.models.plan import PRECISIONS, Machine, cache_share, estimate
    from lilliput.models.sources import resolve

    with drawn() as progress:
        files = resolve(model, revision=revision, token=token, weights=False, progress=progress)
        progress("reading headers", 0, None)
        facts = files.facts()
    each = Machine(
        memory_bytes=size if size is not None else here.free_bytes(),
        bytes_a_second=bandwidth * 1e9 if bandwidth else here.bytes_a_second(),
    )
    cache_tokens = context * sessions
    estimates = [
        estimate(
            facts,
            precision,
            each,
            cache_tokens=cache_tokens,
            round_trip_ms=round_trip,
            machines=machines,
            context=context,
        )
        for precision in PRECISIONS
    ]
    needed = math.ceil(cache_tokens * cache_share(facts, context))
    if as_json:
        typer.echo(json.dumps(_as_json(facts, each, cache_tokens, needed, round_trip, estimates), indent=1))
    else:
        _show(facts, each, cache_tokens, round_trip, machines, estimates)
        if needed < cache_tokens:
            typer.echo(f"Since some blocks keep their windows only, `serve --cache-tokens {needed}` is about enough.")
        if not bandwidth:
            typer.echo("The memory's speed was measured here, now; --bandwidth sets another.")


def shown_size(size: float) -> str:
    """Bytes for people, in units of 1,000."""
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if size < 999.5 or unit == "TB":
            break
        size /= 1000
    return f"{size:.0f} {unit}" if size >= 99.5 or unit == "B" else f"{size:.2g} {unit}"


def _as_json(
    facts: ModelFacts, machine: Machine, cache_tokens: int, needed: int, round_trip: float, estimates: list[Estimate]
) -> dict[str, object]:
    return {
        "model": facts.name,
        "blocks": len(facts.blocks),
        "hidden_size": facts.hidden_size,
        "machine": asdict(machine),
        "cache_tokens": cache_tokens,
        "serve_cache_tokens": needed,
        "round_trip_ms": round_trip,
        "precisions": [{**asdict(e), "network_share": e.network_share} for e in estimates],
    }


def _show(
    facts: ModelFacts,
    machine: Machine,
    cache_tokens: int,
    round_trip: float,
    machines: int | None,
    estimates: list[Estimate],
) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"{facts.name}: {len(facts.blocks)} blocks of width {facts.hidden_size:,}", title_justify="left"
    )
    columns = ("", "a block", "all blocks", "cache a token", "blocks that fit", "machines", "network's share")
    for column in columns:
        table.add_column(column, justify="right" if column else "left")
    for e in estimates:
        share = e.network_share
        table.add_row(
            e.precision,
            shown_size(e.block_bytes),
            shown_size(e.model_bytes),
            shown_size(e.cache_bytes_per_token),
            str(e.blocks_fit),
            "none is enough" if e.machines is None else str(e.machines),
            "" if share is None else f"{share:.0%} of {(e.network_ms or 0) + e.compute_ms:,.0f} ms",
        )
    console = Console(width=None if Console().is_terminal else 110)
    console.print(table)
    over = (
        "as few machines as hold the model" if machines is None else f"{machines} machines, or more where they must be"
    )
    console.print(
        f"A machine: {shown_size(machine.memory_bytes)} for the server, "
        f"read at {shown_size(machine.bytes_a_second)}/s. Cache set aside: {cache_tokens:,} tokens. "
        f"A step: one token over {over}, {round_trip:g} ms there and back between any two, pushed from each to the "
        f"next; its computing is taken to be reading the weights once.",
        highlight=False,
    )
    short = [
        e.precision for e in estimates if e.machines is not None and machines is not None and e.machines > machines
    ]
    if short:
        console.print(f"{machines} such machines are too few in {', '.join(short)}.", highlight=False)
