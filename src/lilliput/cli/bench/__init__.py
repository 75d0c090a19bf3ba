"""`lilliput bench`: how fast it is, side by side with transformers in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lilliput.cli.logs import Verbose


def bench(
    model: Annotated[str, typer.Argument(help="A model of at least 3 blocks.")] = "smollm2",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16",
    servers: Annotated[int, typer.Option(min=1, help="Server processes, each with an equal part.")] = 3,
    rounds: Annotated[int, typer.Option(min=1, help="How often each figure is taken; medians are shown.")] = 5,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Only measures whose name contains this; may be repeated.", show_default=False),
    ] = None,
    json_file: Annotated[Path, typer.Option("--json", help="Where all figures go.")] = Path("bench.json"),
    reference: Annotated[bool, typer.Option(help="Also measure transformers in one process.")] = True,
    verbose: Verbose = 0,
) -> None:
    """Measure a swarm on this machine, side by side with transformers in one process.

    Rounds of both alternate, so that a busy machine slows both: read the ratio rather than one figure.
    """
    from lilliput.cli.process import share_cores

    share_cores()
    from lilliput.cli.bench.report import Report
    from lilliput.cli.bench.suite import run

    report = Report(dtype=dtype, model=model, servers=servers)
    run(report, rounds=rounds, only=only or [], with_reference=reference)
    json_file.write_text(report.to_json())
    report.show(json_file)
