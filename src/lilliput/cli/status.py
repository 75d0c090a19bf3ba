"""`lilliput status`: who is there."""

from __future__ import annotations

from lilliput.cli.logs import Verbose
from lilliput.cli.options import InitialPeers, Model
from lilliput.errors import LilliputError


def status(model: Model, initial_peers: InitialPeers = None, verbose: Verbose = 0) -> None:
    """Show who holds which blocks of a model, with free cache and sessions."""
    raise LilliputError("`lilliput status` is not built yet.")
