"""`lilliput status`: who is there."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mode
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lilliput.cli import process
from lilliput.cli.language_model import NO_PEERS
from lilliput.cli.logs import Verbose
from lilliput.cli.options import InitialPeers, SwarmKeyFile
from lilliput.errors import BadRequest, LilliputError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from lilliput.swarm.records import ServerRecord

#: where there is no terminal, lines may be as long as they are
_UNBOUNDED = 200
_MOST_CELLS = 100
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


@dataclass(frozen=True)
class HeldModel:
    """A model, and who holds what of it."""

    name: str
    blocks: int
    servers: list[ServerRecord]

    def coverage(self) -> list[int]:
        """For each block, how many servers serve it."""
        counts = [0] * self.blocks
        for server in self.servers:
            if server.state == "serving":
                for block in range(server.start, min(server.end, self.blocks)):
                    counts[block] += 1
        return counts

    def missing(self) -> list[tuple[int, int]]:
        """Spans that nobody serves."""
        spans: list[tuple[int, int]] = []
        for block, count in enumerate(self.coverage()):
            if count:
                continue
            if spans and spans[-1][1] == block:
                spans[-1] = (spans[-1][0], block + 1)
            else:
                spans.append((block, block + 1))
        return spans

    def facts(self) -> dict[str, Any]:
        servers = [server.model_dump(mode="json", exclude={"model"}) for server in self.servers]
        return {"model": self.name, "blocks": self.blocks, "missing": self.missing(), "servers": servers}


def status(
    model: Annotated[str | None, typer.Argument(help="Only this one.", show_default="all models")] = None,
    initial_peers: InitialPeers = None,
    swarm_key: SwarmKeyFile = None,
    json_lines: Annotated[bool, typer.Option("--json", help="Print JSON, with all that servers announce.")] = False,
    verbose: Verbose = 0,
) -> None:
    """Show who holds which blocks of which model, with speed, free cache and sessions."""
    process.prepare()
    if not initial_peers:
        raise BadRequest(NO_PEERS)
    with process.ending_at_once():
        from lilliput.collector import collector_paused

        with collector_paused():
            from lilliput.swarm.loop import new_event_loop
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        models = runner.run(_survey(initial_peers, model, swarm_key or None))
    if json_lines:
        print(json.dumps({"models": [held.facts() for held in models]}, indent=2))
    else:
        _show(models)


async def _survey(initial_peers: Sequence[str], wanted: str | None, swarm_key: str | None) -> list[HeldModel]:
    """Ask the swarm."""
    from lilliput.swarm import directory
    from lilliput.swarm.node import Node

    node = await Node.start(initial_peers, client_mode=True, swarm_key=swarm_key)
    try:
        models = await directory.models(node)
        names = list(models)
        if wanted is not None:
            name = _name_in_the_swarm(wanted)
            if name not in models:
                others = f"it has {', '.join(names)}" if names else "it has none at all"
                raise LilliputError(f"No server of this swarm has announced {name}; {others}.")
            names = [name]
        found = await asyncio.gather(*(directory.find(node, name) for name in names))
    finally:
        await node.stop()
    return [
        HeldModel(name, mode(s.model_blocks or s.end for s in servers) if servers else models[name], servers)
        for name, servers in zip(names, found, strict=True)
    ]


def _name_in_the_swarm(model: str) -> str:
    """As servers announce what they were given as `model`; asks no hub."""
    from lilliput.models.sources import DEMO_NAMES, resolve

    if model.lower() in DEMO_NAMES:
        from lilliput.models.sources import DEMO

        return DEMO
    if Path(model).expanduser().is_dir():
        return resolve(model, weights=False).name
    return model.rpartition("/")[2]


def _show(models: Sequence[HeldModel]) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _UNBOUNDED
    if not models:
        console.print("No server has announced itself in this swarm.")
    for number, held in enumerate(models):
        if number:
            console.print()
        _show_model(console, held)


def _show_model(console: Console, held: HeldModel) -> None:
    from rich.table import Table
    from rich.text import Text

    missing = ", ".join(f"{start}:{end}" for start, end in held.missing())
    lacking = Text(f"nobody serves blocks {missing}", "bold red") if missing else Text("all are served", "green")
    console.print(Text.assemble((held.name, "bold"), f", {held.blocks} blocks: ", lacking))
    console.print(_coverage_bar(held, console.width))
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    for heading in ("server", "blocks", "state", "dtype"):
        table.add_column(heading, no_wrap=True)
    for heading in ("tokens/s", "free/cache", "sessions", "queue"):
        table.add_column(heading, justify="right")
    for heading in ("version", "since"):
        table.add_column(heading)
    for server in held.servers:
        table.add_row(
            server.peer_id[-8:],
            f"{server.start}:{server.end}",
            Text(server.state, "green" if server.state == "serving" else "yellow"),
            _DTYPES.get(server.dtype, server.dtype),
            "?" if server.tokens_per_second is None else f"{server.tokens_per_second:.0f}",
            f"{_short(server.cache_tokens_free)}/{_short(server.cache_tokens)}",
            str(server.sessions),
            str(server.queue_length),
            server.version,
            _since(server.started_at),
        )
    if held.servers:
        console.print(table)
    for adapter in sorted({name for server in held.servers for name in server.adapters}):
        spans = sorted({(s.start, s.end) for s in held.servers if adapter in s.adapters})
        console.print(f"adapter {adapter}: blocks {', '.join(f'{start}:{end}' for start, end in spans)}")


def _coverage_bar(held: HeldModel, width: int) -> Text:
    """One cell a block, or one for a few: what is missing in it is seen, however many it stands for."""
    from rich.text import Text

    coverage = held.coverage()
    cells = min(len(coverage), _MOST_CELLS, max(width - 2, 1))
    bar = Text()
    for cell in range(cells):
        first, end = cell * len(coverage) // cells, (cell + 1) * len(coverage) // cells
        least = min(coverage[first:end])
        bar.append(*(("·", "bold red"), ("━", "green"), ("█", "green"))[min(least, 2)])
    if cells and max(coverage) > 1:
        bar.append("  █ by more than one", "dim")
    return bar


def _short(tokens: int) -> str:
    return f"{tokens / 1000:.0f}k" if tokens >= 1000 else str(tokens)


def _since(started_at: float) -> str:
    if not started_at:
        return "?"
    seconds = max(time.time() - started_at, 0.0)
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:.0f}s"
