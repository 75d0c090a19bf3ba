"""`lilliput status`: who is there."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lilliput.cli import process
from lilliput.cli.language_model import NO_PEERS
from lilliput.cli.logs import Verbose
from lilliput.cli.options import InitialPeers, SwarmKeyFile
from lilliput.cli.swarm_table import drawn, new_console
from lilliput.errors import BadRequest, LilliputError

if TYPE_CHECKING:
    from lilliput.swarm.held_model import HeldModel
    from lilliput.swarm.node import Node

    Show = Callable[[Sequence[HeldModel], str], None]

_WATCH_SECONDS = 2.0
#: servers that never answered a ping are waited for so long
_PING_SECONDS = 1.0


def status(
    model: Annotated[str | None, typer.Argument(help="Only this one.", show_default="all models")] = None,
    initial_peers: InitialPeers = None,
    swarm_key: SwarmKeyFile = None,
    watch: Annotated[
        bool,
        typer.Option("--watch", "-w", help="Go on showing it, until Ctrl-C. Without a terminal: one after the other."),
    ] = False,
    json_lines: Annotated[
        bool,
        typer.Option("--json", help="Print JSON, with all that servers announce; with --watch, a line each time."),
    ] = False,
    verbose: Verbose = 0,
) -> None:
    """Show who holds which blocks of which model, with speed, free cache, sessions and the way there and back."""
    process.prepare()
    if not initial_peers:
        raise BadRequest(NO_PEERS)
    with process.ending_at_once():
        from lilliput.collector import collector_paused

        with collector_paused():
            from lilliput.swarm.loop import new_event_loop
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        if watch:
            with _screen(json_lines) as show:
                runner.run(_watch(initial_peers, model, swarm_key or None, show))
        models = runner.run(_look(initial_peers, model, swarm_key or None))
    if json_lines:
        print(_json(models, indent=2))
    else:
        _print(models)


async def _look(initial_peers: Sequence[str], wanted: str | None, swarm_key: str | None) -> list[HeldModel]:
    async with _survey(initial_peers, wanted, swarm_key) as survey:
        return await survey.look()


async def _watch(initial_peers: Sequence[str], wanted: str | None, swarm_key: str | None, show: Show) -> None:
    """Show it again and again. What cannot be seen for a while is shown as it was, with the reason."""
    async with _survey(initial_peers, wanted, swarm_key) as survey:
        models, seen = await survey.look(), time.monotonic()
        trouble = ""
        while True:
            show(models, trouble)
            await asyncio.sleep(_WATCH_SECONDS)
            try:
                models, seen, trouble = await survey.look(), time.monotonic(), ""
            except LilliputError as e:
                trouble = f"as it was {time.monotonic() - seen:.0f} s ago: {e}"


class _Survey:
    """Asks a swarm, as a peer of it. Models that were seen once are shown, also when all their servers have gone."""

    def __init__(self, node: Node, wanted: str | None) -> None:
        from lilliput.swarm.round_trips import RoundTrips

        self._node, self._wanted = node, wanted and _name_in_the_swarm(wanted)
        self._round_trips = RoundTrips(node)
        self._blocks: dict[str, int] = {}

    async def look(self) -> list[HeldModel]:
        """Raises `LilliputError` if there is no answer, or never was a server of the model that is wanted."""
        from lilliput.swarm import directory
        from lilliput.swarm.held_model import HeldModel

        models = await directory.models(self._node)
        known = {**self._blocks, **models}
        if self._wanted is None:
            names = sorted(known)
        elif self._wanted in known:
            names = [self._wanted]
        else:
            others = f"it has {', '.join(models)}" if models else "it has none at all"
            raise LilliputError(f"No server of this swarm has announced {self._wanted}; {others}.")
        found = await asyncio.gather(*(directory.find(self._node, name) for name in names))
        peers = [record.peer_id for records in found for record in records]
        await self._round_trips.renew(peers, within=_PING_SECONDS)
        held = [
            HeldModel.announced(name, records, known[name], self._round_trips.known)
            for name, records in zip(names, found, strict=True)
        ]
        self._blocks = {model.name: model.blocks for model in held}
        return held

    def close(self) -> None:
        self._round_trips.close()


@contextlib.asynccontextmanager
async def _survey(initial_peers: Sequence[str], wanted: str | None, swarm_key: str | None) -> AsyncIterator[_Survey]:
    from lilliput.swarm.node import Node

    node = await Node.start(initial_peers, client_mode=True, swarm_key=swarm_key)
    try:
        with contextlib.closing(_Survey(node, wanted)) as survey:
            yield survey
    finally:
        await node.stop()


def _name_in_the_swarm(model: str) -> str:
    """As servers announce what they were given as `model`; asks no hub."""
    from lilliput.models.sources import DEMO_NAMES, resolve

    if model.lower() in DEMO_NAMES:
        from lilliput.models.sources import DEMO

        return DEMO
    if Path(model).expanduser().is_dir():
        return resolve(model, weights=False).name
    return model.rpartition("/")[2]


# ---- what a person or a program gets


def _json(models: Sequence[HeldModel], indent: int | None = None) -> str:
    return json.dumps({"models": [held.facts() for held in models]}, indent=indent)


def _print(models: Sequence[HeldModel]) -> None:
    console = new_console()
    for part in drawn(models, console.width):
        console.print(part)


@contextlib.contextmanager
def _screen(json_lines: bool) -> Iterator[Show]:
    """What shows a look at the swarm: in place of the last one on a terminal, after it elsewhere."""
    console = new_console()
    if json_lines:
        yield lambda models, trouble: print(_json(models), flush=True)
        return
    if not console.is_terminal:

        def append(models: Sequence[HeldModel], trouble: str) -> None:
            print(f"{time.strftime('%F %T')} {trouble}".rstrip(), flush=True)
            _print(models)
            print(flush=True)

        yield append
        return

    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    with Live(console=console, screen=True, auto_refresh=False) as live:

        def replace(models: Sequence[HeldModel], trouble: str) -> None:
            word = Text(trouble, "yellow") if trouble else Text("Ctrl-C leaves", "dim")
            head = Text.assemble((time.strftime("%T"), "dim"), "  ", word)
            live.update(Group(head, "", *drawn(models, console.width, console.height - 2)), refresh=True)

        yield replace
