"""Arguments and options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

#: a required MODEL where the command gives no default
Model = Annotated[
    str, typer.Argument(help="`smollm2` (the demo), a folder, a .gguf file, or a hub id such as `org/name`.")
]
Revision = Annotated[str | None, typer.Option(help="The hub's branch, tag or commit.", show_default=False)]
Token = Annotated[
    str | None, typer.Option(envvar="HF_TOKEN", help="The hub's access token, for private models.", show_default=False)
]
Adapter = Annotated[
    str, typer.Option(metavar="NAME", help="An adapter that the servers have.", show_default="the model as it is")
]
InitialPeers = Annotated[
    list[str] | None,
    typer.Option(
        "--initial-peers",
        metavar="MULTIADDR",
        envvar="LILLIPUT_PEERS",
        help="A member of the swarm to join; may be repeated. Servers print theirs when they start.",
        show_default=False,
    ),
]
