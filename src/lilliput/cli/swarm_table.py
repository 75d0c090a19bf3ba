"""How it is shown at a terminal who holds what."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

    from lilliput.swarm.held_model import HeldModel
    from lilliput.swarm.records import ServerRecord

#: where there is no terminal, lines may be as long as they are
_UNBOUNDED = 200
_MOST_CELLS = 100
_KEY = "  █ by more than one"
#: of the columns beside the server's name, which takes what is left
_OTHER_COLUMNS = 72
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
#: of a model at least so many servers are shown, however low the screen is
_LEAST_ROWS = 3
#: lines of a model beside those of its servers: title, bar, headings, what is left out, an empty one
_OTHER_LINES = 5


def new_console() -> Console:
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _UNBOUNDED
    return console


def drawn(models: Sequence[HeldModel], width: int, height: int | None = None) -> Iterator[RenderableType]:
    """Each model: what is missing, a bar of its blocks, a table of its servers.

    :param height: lines that there are; servers without room are counted only. None: all are shown.
    """
    if not models:
        yield "No server has announced itself in this swarm."
    for number, held in enumerate(models):
        if number:
            yield ""
        rows = None if height is None else max(_LEAST_ROWS, height // len(models) - _OTHER_LINES)
        yield from _drawn_model(held, width, rows)


def _drawn_model(held: HeldModel, width: int, rows: int | None) -> Iterator[RenderableType]:
    from rich.text import Text

    missing = ", ".join(f"{start}:{end}" for start, end in held.missing())
    lacking = Text(f"nobody serves blocks {missing}", "bold red") if missing else Text("all are served", "green")
    yield Text.assemble((held.name, "bold"), f", {held.blocks} blocks: ", lacking)
    yield _coverage_bar(held, width)
    if held.servers:
        yield _table(held, held.servers[:rows], width)
    if rows is not None and len(held.servers) > rows:
        yield Text(f"and {len(held.servers) - rows} more; `lilliput status` without --watch shows all", "dim")
    for adapter in sorted({name for server in held.servers for name in server.adapters}):
        spans = sorted({(s.start, s.end) for s in held.servers if adapter in s.adapters})
        yield f"adapter {adapter}: blocks {', '.join(f'{start}:{end}' for start, end in spans)}"


def _table(held: HeldModel, servers: Sequence[ServerRecord], width: int) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("server", no_wrap=True, max_width=min(max(width - _OTHER_COLUMNS, 8), 24))
    for heading in ("blocks", "state", "dtype"):
        table.add_column(heading, no_wrap=True)
    for heading in ("tok/s", "free/cache", "sessions", "queue", "ms"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("ver", "since"):
        table.add_column(heading)
    for server in servers:
        table.add_row(
            Text(server.name or server.peer_id[-8:]),
            f"{server.start}:{server.end}",
            Text(server.state, "green" if server.state == "serving" else "yellow"),
            Text(_DTYPES.get(server.dtype, server.dtype)),
            "?" if server.tokens_per_second is None else f"{server.tokens_per_second:.0f}",
            f"{_short(server.cache_tokens_free)}/{_short(server.cache_tokens)}",
            str(server.sessions),
            str(server.queue_length),
            _away(held, server),
            Text(server.version),
            _since(server.started_at),
        )
    return table


def _coverage_bar(held: HeldModel, width: int) -> Text:
    """One cell a block, or one for a few: what is missing in it is seen, however many it stands for."""
    from rich.text import Text

    coverage = held.coverage()
    key = _KEY if max(coverage, default=0) > 1 else ""
    cells = min(len(coverage), _MOST_CELLS, max(width - 2 - len(key), 1))
    bar = Text()
    for cell in range(cells):
        first, end = cell * len(coverage) // cells, (cell + 1) * len(coverage) // cells
        least = min(coverage[first:end])
        bar.append(*(("·", "bold red"), ("━", "green"), ("█", "green"))[min(least, 2)])
    bar.append(key, "dim")
    return bar


def _away(held: HeldModel, server: ServerRecord) -> Text:
    """Milliseconds to a server and back."""
    from rich.text import Text

    if server.peer_id not in held.round_trips:
        return Text("?")
    took = held.round_trips[server.peer_id]
    if took is None:
        return Text("none", "yellow")
    return Text(f"{took * 1e3:.{1 if took < 0.1 else 0}f}")


def _short(tokens: int) -> str:
    return f"{tokens / 1000:.0f}k" if tokens >= 1000 else str(tokens)


def _since(started_at: float) -> str:
    if not started_at:
        return "?"
    seconds = max(time.time() - started_at, 0.0)
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{math.floor(seconds / size)}{unit}"
    return f"{seconds:.0f}s"
