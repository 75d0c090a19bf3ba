"""`lilliput api`: a model in the swarm, over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lilliput.cli import logs, process
from lilliput.cli.language_model import LanguageModel
from lilliput.cli.logs import LogJson, Verbose
from lilliput.cli.options import (
    Audit,
    InitialPeers,
    Model,
    Revision,
    SwarmKeyFile,
    Token,
    TrustedPeers,
    not_empty,
)
from lilliput.cli.output import complain, remark
from lilliput.errors import BadRequest, LilliputError, SwarmError

if TYPE_CHECKING:
    from lilliput.client.remote import RemoteModel
    from lilliput.gateway.http_server import HttpServer, Listener
    from lilliput.gateway.keys import Keys
    from lilliput.gateway.places import Places

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.1
#: as long as blocks have no servers, it is looked for them so often
_LOOK_SECONDS = 2.0
_HOST, _PORT = "127.0.0.1", 8000
_PACKAGES = ("fastapi", "uvicorn", "llguidance", "prometheus_client")
_REQUESTS, _WAITING = 16, 64
#: a request waits so long in the queues of full servers
_QUEUE_SECONDS = 60.0


def api(
    model: Model,
    initial_peers: InitialPeers = None,
    swarm_key: SwarmKeyFile = None,
    trusted_peers: TrustedPeers = None,
    audit: Audit = 0.0,
    host: Annotated[
        str, typer.Option(help="The address to listen on; 0.0.0.0: every one.", callback=not_empty)
    ] = _HOST,
    port: Annotated[int, typer.Option(help="The port to listen on; 0 takes a free one.", min=0, max=65535)] = _PORT,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            envvar="LILLIPUT_API_KEYS",
            help="Ask for it; may be repeated. In the environment, others cannot see it.",
            show_default="no key is asked for",
        ),
    ] = None,
    api_keys: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            envvar="LILLIPUT_API_KEYS_FILE",
            help="Keys with names and limits, one a line; docs/api.md shows some.",
            callback=not_empty,
            show_default=False,
        ),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN",
            help="Let browsers ask from pages of it, such as https://chat.example; may be repeated; '*': all.",
            show_default="pages of this server only",
        ),
    ] = None,
    max_requests: Annotated[
        int, typer.Option(min=1, metavar="N", help="Answer so many requests at a time; others wait.")
    ] = _REQUESTS,
    max_waiting: Annotated[
        int, typer.Option(min=0, metavar="N", help="Let so many requests wait; others are refused.")
    ] = _WAITING,
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
    if missing := _missing_packages():
        raise LilliputError(
            f"`lilliput api` needs {' and '.join(missing).replace('_', '-')}: pip install 'lilliput[api]'"
        )
    process.prepare()
    keys = _keys(api_key or [], api_keys)
    from lilliput.gateway.http_server import Listener

    listener = Listener(host, port)  # before what takes its time: it may be in use
    with contextlib.closing(listener), contextlib.ExitStack() as leaving:
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
                wait=None,
                notice=remark,
            )
        )
        logs.take_over()
        from lilliput.gateway.places import Places

        aliases = [] if Path(model).expanduser().is_dir() else [model]
        signals = leaving.enter_context(process.signals_noted())
        places = Places(max_requests, max_waiting)
        server = leaving.enter_context(
            _serving(language_model, listener, places, keys=keys, aliases=aliases, origins=allow_origin or ())
        )
        told, waits = False, threading.Event()
        watching = language_model.loop.submit(_watch(language_model.distributed.remote.remote_model, waits))
        leaving.callback(watching.cancel)
        while server.serves and not signals:
            if watching.done():
                watching.result()
            if not told and (watching.done() or waits.is_set()):
                _tell(listener.url, language_model.name, json_line)
                told = True
            time.sleep(_POLL_SECONDS)
    if signals:
        raise SystemExit(128 + signals[0])
    raise LilliputError("the HTTP server has ended")


async def _watch(remote: RemoteModel, waits: threading.Event) -> None:
    """Return when every block has a server; say meanwhile what is missing. Raises what waiting does not mend.

    :param waits: set if something is missing
    """
    from lilliput.swarm.swarm_key import NotAMember

    said = ""
    while True:
        try:
            await remote.chain(0, remote.blocks)
            break
        except NotAMember:
            raise
        except SwarmError as e:
            if str(e) != said:
                logger.warning("waiting, requests are answered with 503 until then: %s", e)
            said = str(e)
        waits.set()
        await asyncio.sleep(_LOOK_SECONDS)
        remote.connection.try_again()
    if said:
        logger.warning("every block of %s has a server now", remote.name)


def _missing_packages() -> list[str]:
    return [name for name in _PACKAGES if find_spec(name) is None]


def _keys(secrets: Sequence[str], file: str | None) -> Keys:
    from lilliput.gateway.keys import Key, Keys, read_keys

    return Keys([*(Key(f"key-{n}", secret) for n, secret in enumerate(secrets, 1)), *(read_keys(file) if file else [])])


@contextlib.contextmanager
def _serving(
    model: LanguageModel,
    listener: Listener,
    places: Places,
    *,
    keys: Keys | None = None,
    aliases: Sequence[str] = (),
    origins: Sequence[str] = (),
    patience: int = 3,
) -> Iterator[HttpServer]:
    from lilliput.gateway.app import make_app
    from lilliput.gateway.http_server import HttpServer
    from lilliput.gateway.served_model import ServedModel
    from lilliput.gateway.service import Service

    served = ServedModel(model.name, model.distributed, model.tokenizer, aliases=aliases)
    with contextlib.closing(served):
        server = HttpServer(make_app(Service(served, places), keys, origins), model.loop, listener, patience=patience)
        with contextlib.closing(server):
            yield server


@contextlib.contextmanager
def api_beside(model: LanguageModel, alias: str) -> Iterator[str]:
    """The API in this process, with a model that something else uses here, too. Yields its address at once.

    Its libraries are loaded meanwhile, in a thread: connections wait for them. Without them there is no address.
    """
    if _missing_packages():
        yield ""
        return
    from lilliput.gateway.http_server import Listener

    try:
        listener = Listener(_HOST, _PORT)
    except BadRequest:
        listener = Listener(_HOST, 0)
    listener.listen()
    ending = threading.Event()

    def run() -> None:
        try:
            from lilliput.gateway.places import Places

            with _serving(model, listener, Places(_REQUESTS, _WAITING), aliases=[alias], patience=0):
                ending.wait()
        except Exception as e:  # it is not what the process is there for
            complain(f"the API at {listener.url} has failed: {e}")

    thread = threading.Thread(target=run, name="api", daemon=True)
    thread.start()
    with contextlib.closing(listener), process.abandoning(thread):
        try:
            yield listener.url
        finally:
            ending.set()
            thread.join()


def _tell(url: str, name: str, json_line: bool) -> None:
    if json_line:
        print(json.dumps({"url": url, "model": name}), flush=True)
    else:
        typer.echo(f"Serving {name} at {url}/v1. Chat at {url}/  Ctrl-C stops it.")
