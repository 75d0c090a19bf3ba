"""`lilliput serve`: hold some blocks of a model."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lilliput.cli import logs, process
from lilliput.cli.logs import LogJson, Verbose
from lilliput.cli.options import (
    Announce,
    Host,
    IdentityFile,
    InitialPeers,
    Model,
    Nat,
    Port,
    Relay,
    Revision,
    SwarmKeyFile,
    Token,
    listen_address,
    parse_size,
)
from lilliput.cli.supervisor import Supervisor
from lilliput.errors import LilliputError
from lilliput.swarm.sockets import remove_stale_sockets

if TYPE_CHECKING:
    from lilliput.models.progress import Progress
    from lilliput.server.metrics import MetricsPage
    from lilliput.server.server import Server
    from lilliput.server.service import Service

_POLL_SECONDS = 0.1
_MOST_NAME = 40


def serve(
    model: Model,
    blocks: Annotated[
        str | None,
        typer.Option(
            metavar="START:END",
            help="Which blocks, END excluded, as in 0:10.",
            show_default="where they help most, as many as fit",
        ),
    ] = None,
    num_blocks: Annotated[
        int | None, typer.Option(min=1, help="Without --blocks: how many.", show_default="as many as fit into memory")
    ] = None,
    rebalance_seconds: Annotated[
        float, typer.Option(min=0, help="Without --blocks: look about this often whether to move; 0: never.")
    ] = 120.0,
    initial_peers: InitialPeers = None,
    swarm_key: SwarmKeyFile = None,
    name: Annotated[
        str,
        typer.Option(help="What people shall call this server, in `status` and elsewhere.", show_default="its key"),
    ] = "",
    host: Host = "0.0.0.0",
    port: Port = 0,
    announce: Announce = None,
    identity: IdentityFile = None,
    nat: Nat = False,
    relay: Relay = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="What computes: cpu, cuda, or one of several such as cuda:1.")] = "cpu",
    quantize: Annotated[
        str | None, typer.Option(help="int8, int4 or nf4: keep the weights in fewer bits.", show_default="no")
    ] = None,
    cache_dtype: Annotated[
        str | None, typer.Option(help="int8: keep the attention cache in 8 bits.", show_default="as --dtype")
    ] = None,
    cache_tokens: Annotated[
        int | None, typer.Option(min=32, help="Attention cache, in tokens.", show_default="a quarter of free memory")
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(min=1, help="Tokens per row of a session.", show_default="the model's own")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Processor threads.", show_default="all, in turns")] = None,
    share_prefixes: Annotated[
        bool, typer.Option("--share-prefixes", help="Let clients reuse each other's cached prompts.")
    ] = False,
    declare_uids: Annotated[
        bool, typer.Option("--declare-uids", help="Also declare the blocks as hivemind's experts.")
    ] = False,
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=FOLDER", help="A LoRA adapter that PEFT has saved; may be repeated.", show_default=False
        ),
    ] = None,
    peer_sessions: Annotated[
        int, typer.Option(min=1, metavar="N", help="Sessions of one peer, running and waiting.")
    ] = 256,
    peer_share: Annotated[
        float,
        typer.Option(
            min=0.01,
            max=1.0,
            metavar="SHARE",
            help="Of the cache, at most so much for one peer. Where others wait, all get equal shares anyway.",
        ),
    ] = 1.0,
    peer_rate: Annotated[
        str, typer.Option(metavar="SIZE", help="Bytes a second that one peer may send on average, as in 10MB.")
    ] = "128MiB",
    drain_seconds: Annotated[
        float, typer.Option(min=0, help="When told to leave, let sessions move to other servers for so long.")
    ] = 3.0,
    metrics_port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Also serve numbers for Prometheus there.", show_default=False),
    ] = None,
    revision: Revision = None,
    token: Token = None,
    json_line: Annotated[
        bool, typer.Option("--json", help="When ready, print one JSON line instead of words.", show_default=False)
    ] = False,
    supervised: Annotated[bool, typer.Option("--supervised", hidden=True)] = False,
    log_json: LogJson = False,
    verbose: Verbose = 0,
) -> None:
    """Hold some blocks of a model and serve them to a swarm, until Ctrl-C (twice: at once)."""
    span = parse_blocks(blocks) if blocks is not None else None
    if span and num_blocks is not None:
        raise typer.BadParameter("--blocks says how many blocks already", param_hint="--num-blocks")
    if len(name) > _MOST_NAME:
        raise typer.BadParameter(f"{_MOST_NAME} characters are enough for a name", param_hint="--name")
    adapters = parse_adapters(adapter or ())
    rate = parse_size(peer_rate, "--peer-rate")
    if metrics_port is not None and find_spec("prometheus_client") is None:
        raise LilliputError("`--metrics-port` needs prometheus-client: pip install 'lilliput[api]'")
    process.prepare()
    server: Server | None = None
    metrics = _metrics(lambda: server and server.service, host, metrics_port)
    supervisor = Supervisor() if supervised else None
    if supervisor:
        supervisor.stage("loading libraries")
    with process.ending_at_once():
        from lilliput.collector import collector_paused
        from lilliput.models.sources import resolve

        with collector_paused():
            from lilliput.server.server import Server
    logs.take_over()
    if supervisor:
        supervisor.stage("finding the swarm")
        initial_peers = supervisor.peers()

    with metrics or contextlib.nullcontext(), contextlib.ExitStack() as leaving:
        with _progress(supervisor) as progress:
            files = resolve(model, revision=revision, token=token, weights=False, progress=progress)
            if span:
                files.fetch(span, progress)
            server = Server(
                files,
                span,
                initial_peers=initial_peers or (),
                host_maddrs=[listen_address(host, port)],
                announce_maddrs=announce,
                identity_path=identity,
                nat=nat,
                relays=relay or None,
                swarm_key=swarm_key or None,
                name=name,
                dtype=dtype,
                device=device,
                quantize=quantize,
                cache_dtype=cache_dtype,
                cache_tokens=cache_tokens,
                max_length=max_length,
                threads=threads,
                share_prefixes=share_prefixes,
                declare_uids=declare_uids,
                adapters=adapters,
                max_sessions_per_peer=peer_sessions,
                peer_share=peer_share,
                peer_rate=rate,
                drain_seconds=drain_seconds,
                num_blocks=num_blocks,
                rebalance_seconds=rebalance_seconds,
                progress=lambda stage: None if server and server.decided.is_set() else progress(stage, 0, None),
            )
            # from here on there is something to clear away, which a second signal must not interrupt
            signals = leaving.enter_context(process.signals_noted())
            if supervisor:
                leaving.callback(remove_stale_sockets)  # the supervisor may have been killed
            leaving.callback(server.shutdown)
            server.run_in_background(await_ready=False)

            def told() -> bool:
                # where a supervisor's end raised `SystemExit` in a library that lets nothing out, no signal is noted
                return bool(signals) or (supervisor is not None and supervisor.gone)

            while not server.decided.wait(_POLL_SECONDS) and not told():
                pass
        if server.ready.is_set():
            _tell(server, supervisor, json_line, metrics.url if metrics else "")
        shown = server.blocks
        while server.is_alive() and not told():
            time.sleep(_POLL_SECONDS)
            if server.blocks != shown and server.ready.is_set() and not (supervisor or json_line):
                shown = server.blocks
                typer.echo(f"Moved to blocks {shown[0]}:{shown[1]}, where this server helps more.")
        if signals and not (supervisor and supervisor.gone):  # else everybody leaves
            server.drain()
            while server.is_alive() and len(signals) == 1:  # the second time means: now
                time.sleep(_POLL_SECONDS)
    loading = [thread for thread in threading.enumerate() if thread.name == "loading"]
    code = 128 + (signals[0] if signals else signal.SIGTERM)
    process.abandon(loading, code if told() else 1)
    if told():
        raise SystemExit(code)
    server.raise_failure()


def parse_blocks(text: str) -> tuple[int, int]:
    """`0:10` as `(0, 10)`."""
    start, colon, end = text.partition(":")
    if not (colon and start.strip().isdecimal() and end.strip().isdecimal()) or int(start) >= int(end):
        raise typer.BadParameter(f"{text!r} is not a span of blocks such as 0:10", param_hint="--blocks")
    return int(start), int(end)


def parse_adapters(texts: Sequence[str]) -> dict[str, str]:
    """`NAME=FOLDER`s as `{NAME: FOLDER}`."""
    adapters: dict[str, str] = {}
    for text in texts:
        name, equals, folder = text.partition("=")
        if not (name and equals and folder) or name in adapters:
            what = "names an adapter a second time" if name in adapters else "is no adapter such as poems=./poems-lora"
            raise typer.BadParameter(f"{text!r} {what}", param_hint="--adapter")
        adapters[name] = folder
    return adapters


@contextlib.contextmanager
def _progress(supervisor: Supervisor | None) -> Iterator[Progress]:
    from lilliput.cli.progress import drawn

    if supervisor is None:
        with drawn() as progress:
            yield progress
    else:
        yield _new_stages(supervisor.stage)


def _new_stages(tell: Callable[[str], None]) -> Progress:
    last = ""

    def report(stage: str, done: int, total: int | None) -> None:
        nonlocal last
        if stage != last:
            tell(stage)
        last = stage

    return report


def _metrics(service: Callable[[], Service | None], host: str, port: int | None) -> MetricsPage | None:
    """Numbers, if they are wanted. They come before the libraries, so that a port in use is found out at once."""
    if port is None:
        return None
    from lilliput.server.metrics import MetricsPage

    return MetricsPage(service, host, port)


def _facts(server: Server) -> dict[str, Any]:
    service = server.service
    assert service is not None
    return {
        "model": service.model,
        "blocks": list(server.blocks),
        "pid": os.getpid(),
        "peer_id": str(server.dht.peer_id) if server.dht else "",
        "addresses": list(server.addresses),
        "cache_tokens": service.admission.tokens,
        "adapters": {name: adapter.nbytes for name, adapter in service.span.adapters.items()},
    }


def _tell(server: Server, supervisor: Supervisor | None, json_line: bool, metrics: str) -> None:
    facts = _facts(server) | ({"metrics": metrics} if metrics else {})
    if supervisor:
        supervisor.tell(facts)
    elif json_line:
        print(json.dumps(facts), flush=True)
    else:
        start, end = server.blocks
        for name, nbytes in facts["adapters"].items():
            typer.echo(f"Adapter {name}: {nbytes / (1 << 20):.1f} MiB for these blocks.")
        typer.echo(
            f"Serving blocks {start}:{end} of {facts['model']} in {server.options.precision}, with cache for "
            f"{facts['cache_tokens']:,} tokens. Ctrl-C or `lilliput drain {os.getpid()}` stops it. "
            "Others join with one of"
        )
        for address in server.addresses:
            typer.echo(f"  --initial-peers {address}")
        if metrics:
            typer.echo(f"Numbers for Prometheus are at {metrics}")
