"""Progress on standard error: a bar for each stage; a line for each, or an event of the log, where nobody looks on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lilliput.cli import logs
from lilliput.models.progress import Progress

logger = logging.getLogger(__name__)


@contextmanager
def drawn() -> Iterator[Progress]:
    """A function of a stage, its bytes done, and its bytes to do (None: unknown). A new stage ends the last."""
    if logs.are_json():
        yield _lines(logger.info)
        return
    from rich import progress as rich
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(console.print)
        return
    columns = (rich.SpinnerColumn(finished_text="✓"), rich.TextColumn("{task.description}"), rich.BarColumn(30))
    with rich.Progress(*columns, rich.TextColumn("{task.fields[size]}"), console=console) as bars:
        stages: dict[str, rich.TaskID] = {}

        def complete() -> None:
            for task in bars.tasks:
                bars.update(task.id, total=task.total or 1, completed=task.total or 1)

        def report(stage: str, done: int, total: int | None) -> None:
            if stage not in stages:
                complete()
                stages[stage] = bars.add_task(stage, size="")
            size = f"{done / 1e6:.0f} of {total / 1e6:.0f} MB" if total else ""
            bars.update(stages[stage], completed=done, total=total, size=size)

        yield report
        complete()


def _lines(say: Callable[[str], None]) -> Progress:
    last = ""

    def report(stage: str, done: int, total: int | None) -> None:
        nonlocal last
        if stage != last:
            say(f"{stage} ...")
        last = stage

    return report
