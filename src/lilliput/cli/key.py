"""`lilliput key`: make the key of a private swarm."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer

from lilliput.cli.options import not_empty


def key(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="Where to put it; must not exist yet.", callback=not_empty)
    ],
) -> None:
    """Make a key for a private swarm: whoever has it is a member.

    Copy it to every member in a safe way (scp, not mail), and name it with --swarm-key. A swarm whose key has become
    known gets a new one: nobody can be shut out otherwise.
    """
    from lilliput.swarm.swarm_key import SwarmKey

    made = SwarmKey.generate()
    made.write(file)
    name = shlex.quote(file)
    typer.echo(f"The key {made.name} is in {file}. Name it with --swarm-key {name} on every machine of the swarm.")
