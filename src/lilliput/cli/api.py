"""`lilliput api`: a model in the swarm, over HTTP."""

from __future__ import annotations

import contextlib
import json
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from lilliput.cli import logs, process
from lilliput.cli.language_model import LanguageModel
from lilliput.cli.logs import LogJson, Verbose
from lilliput.cli.options import Audit, InitialPeers, Model, Revision, SwarmKeyFile, Token, TrustedPeers
from lilliput.cli.output import remark
from lilliput.errors import LilliputError

_POLL_SECONDS = 0.1
_PACKAGES = ("fastapi", "uvicorn", "llguidance", "prometheus_client")
#: a request waits so long in the queues of full servers
_QUEUE_SECONDS = 60.0


def api(
    model: Model,
    initial_peers: InitialPeers = None,
    swarm_key: SwarmKeyFile = None,
    trusted_peers: TrustedPeers = None,
    audit: Audit = 0.0,
    host: Annotated[str, typer.Option(help="The address to listen on; 0.0.0.0: every one.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port to listen on; 0 takes a free one.", min=0, max=65535)] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            envvar="LILLIPUT_API_KEYS",
            help="Ask for it; may be repeated. In the environment, others cannot see it.",
            show_default="no key is asked for",
        ),
    ] = None,
    max_requests: Annotated[
        int, typer.Option(min=1, metavar="N", help="Answer so many requests at a time; others wait.")
    ] = 16,
    max_waiting: Annotated[
        int, typer.Option(min=0, metavar="N", help="Let so many requests wait; others are refused.")
    ] = 64,
    dtype: Annotated[
        str | None, typer.Option(help="Of the model's ends and of what is sent.", show_default="the checkpoint's")
    ] = None,
    revision: Revision = None,
    token: Token = None,
    json_line: Annotated[
        bool, typer.Option("--json", help="When ready, print one JSON line instead of words.", show_default=False)
    ] = False,
    log_json: LogJson = False,
    verbose: Verbose = 0,
) -> None:
    """Serve a model of a swarm over HTTP, as OpenAI's clients expect it, with a page to chat on."""
    if not all(key.strip() for key in api_key or ()):
        raise typer.BadParameter("an empty key would let everyone in", param_hint="--api-key")
    if missing := [name for name in _PACKAGES if find_spec(name) is None]:
        raise LilliputError(
            f"`lilliput api` needs {' and '.join(missing).replace('_', '-')}: pip install 'lilliput[api]'"
        )
    process.prepare()
    with contextlib.ExitStack() as leaving:
        language_model = leaving.enter_context(
            LanguageModel.open(
                model,
                initial_peers,
                swarm_key=swarm_key,
                trusted_peers=trusted_peers or (),
                audit=audit,
                dtype=dtype,
                revision=revision,
                token=token,
                queue=_QUEUE_SECONDS,
                notice=remark,
            )
        )
        logs.take_over()
        from lilliput.gateway.app import make_app
        from lilliput.gateway.http_server import HttpServer
        from lilliput.gateway.places import Places
        from lilliput.gateway.served_model import ServedModel
        from lilliput.gateway.service import Service

        aliases = [] if Path(model).expanduser().is_dir() else [model]
        served = ServedModel(language_model.name, language_model.distributed, language_model.tokenizer, aliases=aliases)
        leaving.callback(served.close)
        signals = leaving.enter_context(process.signals_noted())
        app = make_app(Service(served, Places(max_requests, max_waiting)), keys=api_key or ())
        server = HttpServer(app, language_model.loop, host=host, port=port)
        leaving.callback(server.close)
        _tell(server.url, served.name, json_line)
        while server.serves and not signals:
            time.sleep(_POLL_SECONDS)
    if signals:
        raise SystemExit(128 + signals[0])
    raise LilliputError("the HTTP server has ended")


def _tell(url: str, name: str, json_line: bool) -> None:
    if json_line:
        print(json.dumps({"url": url, "model": name}), flush=True)
    else:
        typer.echo(f"Serving {name} at {url}/v1. Chat at {url}/  Ctrl-C stops it.")
