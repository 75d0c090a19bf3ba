"""`lilliput generate`: one answer."""

from __future__ import annotations

from typing import Annotated

import typer

from lilliput.cli.logs import Verbose
from lilliput.cli.options import InitialPeers, Model, Revision, Token
from lilliput.errors import LilliputError


def generate(
    model: Model,
    prompt: Annotated[str, typer.Argument(help="The text.")],
    initial_peers: InitialPeers = None,
    revision: Revision = None,
    token: Token = None,
    verbose: Verbose = 0,
) -> None:
    """Continue a text, or answer one question, and leave."""
    raise LilliputError("`lilliput generate` is not built yet.")
