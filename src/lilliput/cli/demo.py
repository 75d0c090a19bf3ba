"""`lilliput demo`: a whole swarm on this machine."""

from __future__ import annotations

from lilliput.cli.logs import Verbose
from lilliput.errors import LilliputError


def demo(verbose: Verbose = 0) -> None:
    """Start three servers of a small real model on this machine, and chat with it."""
    raise LilliputError("`lilliput demo` is not built yet.")
