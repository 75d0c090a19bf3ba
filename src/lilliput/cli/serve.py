"""`lilliput serve`: hold some blocks of a model."""

from __future__ import annotations

from typing import Annotated

import typer

from lilliput.cli.logs import Verbose
from lilliput.cli.options import InitialPeers, Model, Revision, Token
from lilliput.errors import LilliputError


def serve(
    model: Model,
    blocks: Annotated[str, typer.Option(metavar="START:END", help="Which blocks, END excluded, as in 0:10.")],
    initial_peers: InitialPeers = None,
    revision: Revision = None,
    token: Token = None,
    verbose: Verbose = 0,
) -> None:
    """Hold some blocks of a model and serve them to a swarm, until Ctrl-C."""
    raise LilliputError("`lilliput serve` is not built yet.")
