"""Arguments and options that several commands share."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from lilliput.errors import BadRequest
from lilliput.swarm.addresses import check_form
from lilliput.swarm.swarm_key import SwarmKey

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT]I?)B?|B)", re.IGNORECASE)  # 8 alone may be meant as 8 GB


def not_empty(text: str | None) -> str | None:
    """A callback of options for which an empty text, as of a shell's variable that is not set, would mean something
    else than was meant: a swarm without a key, an API that asks for none, every address."""
    if text is not None and not text.strip():
        raise typer.BadParameter("it is empty; is a variable of your shell not set?")
    return text


def _addresses(*, of_peers: bool) -> Callable[[Sequence[str] | None], Sequence[str] | None]:
    """Refuse, before libraries are loaded, what cannot be an address."""

    def check(addresses: Sequence[str] | None) -> Sequence[str] | None:
        for address in addresses or ():
            try:
                check_form(address, needs_peer=of_peers)
            except BadRequest as e:
                raise typer.BadParameter(str(e)) from e
        return addresses

    return check


def _key_file(file: str | None) -> str | None:
    not_empty(file)
    try:
        SwarmKey.of(file, warn=False)
    except BadRequest as e:
        raise typer.BadParameter(str(e)) from e
    return file


def _identity_file(file: str | None) -> str | None:
    not_empty(file)
    if file is None:
        return file
    file = os.path.expanduser(file)
    folder = Path(file).absolute().parent
    try:
        with open(file, "rb"):
            pass
    except FileNotFoundError as e:  # it will be made
        if not folder.is_dir():
            raise typer.BadParameter(f"there is no folder {folder}") from e
    except OSError as e:
        raise typer.BadParameter(f"cannot read {file}: {e.strerror or e}") from e
    return file


def _initial_peers(check: Callable[..., Any] | None) -> Any:
    return typer.Option(
        "--initial-peers",
        metavar="MULTIADDR",
        envvar="LILLIPUT_PEERS",
        help="A member of the swarm to join; may be repeated. Servers print theirs when they start.",
        show_default=False,
        callback=check,
    )


def _swarm_key(check: Callable[..., Any] | None) -> Any:
    return typer.Option(
        "--swarm-key",
        metavar="FILE",
        envvar="LILLIPUT_SWARM_KEY",
        help="The key of a private swarm, which all its members have; `lilliput key` makes one.",
        show_default="a public swarm",
        callback=check,
    )


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
InitialPeers = Annotated[list[str] | None, _initial_peers(_addresses(of_peers=True))]
SwarmKeyFile = Annotated[str | None, _swarm_key(_key_file)]
#: for who wants to say more about what is wrong with them
AnyInitialPeers = Annotated[list[str] | None, _initial_peers(None)]
AnySwarmKeyFile = Annotated[str | None, _swarm_key(not_empty)]
TrustedPeers = Annotated[
    list[str] | None,
    typer.Option(
        "--trusted-peers",
        metavar="PEER",
        help="Only these peers compute the first and the last span, where text can be read; may be repeated.",
        show_default="any peer",
    ),
]
Audit = Annotated[
    float,
    typer.Option(
        min=0,
        max=1,
        metavar="SHARE",
        help="Have such a share of what servers return (as 0.01) computed by others, too; use none that lies.",
        show_default="0, nothing",
    ),
]
Host = Annotated[str, typer.Option(help="The address to listen on.", callback=not_empty)]
Port = Annotated[int, typer.Option(help="The TCP port to listen on; 0 takes a free one.", min=0, max=65535)]
Announce = Annotated[
    list[str] | None,
    typer.Option(
        metavar="MULTIADDR",
        help="The address to tell others, if it is another: behind a router, its own.",
        show_default=False,
        callback=_addresses(of_peers=False),
    ),
]
IdentityFile = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="A file that keeps the peer's id over restarts; made if missing.",
        show_default=False,
        callback=_identity_file,
    ),
]
Nat = Annotated[
    bool,
    typer.Option("--nat", help="Ask the router to open the port; where it does not, use relays.", show_default=False),
]
Relay = Annotated[
    list[str] | None,
    typer.Option(
        metavar="MULTIADDR",
        help="We cannot be dialled: be reached through this peer of the swarm, which can; may be repeated.",
        show_default=False,
        callback=_addresses(of_peers=True),
    ),
]


def listen_address(host: str, port: int) -> str:
    """As libp2p writes it."""
    kind = "ip6" if ":" in host else "ip4" if host.replace(".", "").isdecimal() else "dns"
    return f"/{kind}/{host}/tcp/{port}"


def parse_size(text: str, option: str) -> int:
    """`8GB`, `512MiB`, `1.5 G` in bytes."""
    found = _SIZE.fullmatch(text.strip())
    size = float(found[1]) * _UNITS[(found[2] or "").upper()] if found else 0
    if size < 1:
        raise typer.BadParameter(f"{text!r} is not a size such as 8GB or 512MiB", param_hint=option)
    return int(size)
