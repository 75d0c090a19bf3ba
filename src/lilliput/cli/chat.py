"""`lilliput chat`: talk to a model in the swarm."""

from __future__ import annotations

from lilliput.cli.logs import Verbose
from lilliput.cli.options import InitialPeers, Model, Revision, Token
from lilliput.errors import LilliputError


def chat(
    model: Model,
    initial_peers: InitialPeers = None,
    revision: Revision = None,
    token: Token = None,
    verbose: Verbose = 0,
) -> None:
    """Talk to a model that a swarm holds."""
    raise LilliputError("`lilliput chat` is not built yet.")
