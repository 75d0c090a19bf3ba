"""`lilliput fetch`: have a model's files on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from lilliput.cli.logs import Verbose
from lilliput.cli.options import Model, Revision, Token
from lilliput.cli.progress import drawn


def fetch(
    model: Model = "smollm2",
    revision: Revision = None,
    token: Token = None,
    weights: Annotated[bool, typer.Option(help="Fetch the weights too, not only configuration and tokenizer.")] = True,
    verbose: Verbose = 0,
) -> None:
    """Fetch a model, if it is not here yet, and print the folder where it lies."""
    from lilliput.models.sources import resolve

    with drawn() as progress:
        files = resolve(model, revision=revision, token=token, weights=weights, progress=progress)
    typer.echo(files.path)
