"""`lilliput serve`: hold some blocks of a model."""

from __future__ import annotations

import json
import os
import threading
from typing import TYPE_CHECKING, Annotated

import typer

from lilliput.cli.logs import Verbose
from lilliput.cli.options import InitialPeers, Model, Revision, Token

if TYPE_CHECKING:
    from lilliput.server.server import Server


def serve(
    model: Model,
    blocks: Annotated[str, typer.Option(metavar="START:END", help="Which blocks, END excluded, as in 0:10.")],
    initial_peers: InitialPeers = None,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "0.0.0.0",
    port: Annotated[int, typer.Option(help="The TCP port to listen on; 0 takes a free one.", min=0, max=65535)] = 0,
    announce: Annotated[
        list[str] | None,
        typer.Option(metavar="MULTIADDR", help="The address to tell others, if it is another.", show_default=False),
    ] = None,
    identity: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="A key that keeps the peer's id over restarts.", show_default=False),
    ] = None,
    nat: Annotated[bool, typer.Option("--nat", help="Ask the gateway to open the port.", show_default=False)] = False,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    cache_tokens: Annotated[
        int | None, typer.Option(min=32, help="Attention cache, in tokens.", show_default="a quarter of free memory")
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(min=1, help="Tokens per row of a session.", show_default="the model's own")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Processor threads.", show_default="all")] = None,
    share_prefixes: Annotated[
        bool, typer.Option("--share-prefixes", help="Let clients reuse each other's cached prompts.")
    ] = False,
    declare_uids: Annotated[
        bool, typer.Option("--declare-uids", help="Also declare the blocks as hivemind's experts.")
    ] = False,
    revision: Revision = None,
    token: Token = None,
    json_line: Annotated[
        bool, typer.Option("--json", help="When ready, print one JSON line instead of words.", show_default=False)
    ] = False,
    until_stdin_closes: Annotated[bool, typer.Option("--until-stdin-closes", hidden=True)] = False,
    verbose: Verbose = 0,
) -> None:
    """Hold some blocks of a model and serve them to a swarm, until Ctrl-C."""
    span = parse_blocks(blocks)
    # Several servers may share a machine; a thread that waits for work must not burn the core that others compute on.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    stop = threading.Event()
    if until_stdin_closes:  # whoever started this process may end in any way: the pipe closes
        threading.Thread(target=_wait_for_stdin, args=(stop,), daemon=True).start()

    from lilliput.cli.progress import drawn
    from lilliput.models.sources import resolve
    from lilliput.server.server import Server

    with drawn() as progress:
        files = resolve(model, revision=revision, token=token, progress=progress)
        server = Server(
            files,
            span,
            initial_peers=initial_peers or (),
            host_maddrs=[_listen_address(host, port)],
            announce_maddrs=announce,
            identity_path=identity,
            nat=nat,
            dtype=dtype,
            cache_tokens=cache_tokens,
            max_length=max_length,
            threads=threads,
            share_prefixes=share_prefixes,
            declare_uids=declare_uids,
            progress=lambda stage: progress(stage, 0, None),
        )
        try:
            server.run_in_background(await_ready=False)
            while not server.decided.wait(0.2) and not stop.is_set():
                pass
            server.raise_failure()
        except BaseException:
            server.shutdown()
            raise
    try:
        if server.ready.is_set():
            _tell(server, json_line)
        while server.is_alive() and not stop.wait(0.2):
            pass
    finally:
        server.shutdown()
    server.raise_failure()


def parse_blocks(text: str) -> tuple[int, int]:
    """`0:10` as `(0, 10)`."""
    start, colon, end = text.partition(":")
    if not (colon and start.strip().isdecimal() and end.strip().isdecimal()) or int(start) >= int(end):
        raise typer.BadParameter(f"{text!r} is not a span of blocks such as 0:10", param_hint="--blocks")
    return int(start), int(end)


def _listen_address(host: str, port: int) -> str:
    kind = "ip6" if ":" in host else "ip4" if host.replace(".", "").isdecimal() else "dns"
    return f"/{kind}/{host}/tcp/{port}"


def _tell(server: Server, json_line: bool) -> None:
    service = server.service
    assert service is not None
    start, end = server.blocks
    admission = service.admission
    if json_line:
        facts = {
            "model": service.model,
            "blocks": [start, end],
            "peer_id": str(server.dht.peer_id) if server.dht else "",
            "addresses": list(server.addresses),
            "cache_tokens": admission.pages * admission.page_size,
        }
        print(json.dumps(facts), flush=True)
        return
    typer.echo(
        f"Serving blocks {start}:{end} of {service.model} in {server.options.dtype}, with cache for "
        f"{admission.pages * admission.page_size:,} tokens. Ctrl-C stops it. Others join with one of"
    )
    for address in server.addresses:
        typer.echo(f"  --initial-peers {address}")


def _wait_for_stdin(stop: threading.Event) -> None:
    try:
        while os.read(0, 4096):
            pass
    except OSError:
        pass
    stop.set()
