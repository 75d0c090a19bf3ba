"""`lilliput bench`: how fast it is."""

from __future__ import annotations

from lilliput.cli.logs import Verbose
from lilliput.errors import LilliputError


def bench(verbose: Verbose = 0) -> None:
    """Measure a swarm on this machine, side by side with transformers in one process."""
    raise LilliputError("`lilliput bench` is not built yet.")
