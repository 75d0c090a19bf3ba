"""`lilliput demo`: a whole swarm on this machine."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated

import typer

from lilliput.cli import process
from lilliput.cli.api import api_beside
from lilliput.cli.chat import Chat, at_a_terminal
from lilliput.cli.conversation import Conversation
from lilliput.cli.language_model import LanguageModel, load_libraries
from lilliput.cli.local_swarm import LocalServer, LocalSwarm
from lilliput.cli.logs import Verbose
from lilliput.cli.nursery import Nursery
from lilliput.cli.output import remark
from lilliput.cli.progress import drawn
from lilliput.errors import BadRequest

_MODEL = "smollm2"
_QUESTION = "What is the capital of France?"
#: that a server names while it starts
_STAGES = 5


def demo(
    servers: Annotated[int, typer.Option(min=1, help="Server processes, each with an equal part of the blocks.")] = 3,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16",
    question: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Ask this instead of opening a chat.", show_default=False)
    ] = None,
    verbose: Verbose = 0,
) -> None:
    """Start three servers of a small real model on this machine, and chat with it.

    As long as the chat lasts, programs can talk to the model, too: the API of `lilliput api` runs in the same process.
    Without a terminal, one question is asked.
    """
    process.prepare()
    began = time.perf_counter()
    from lilliput.models.sources import resolve

    with contextlib.ExitStack() as stack:
        loaded = stack.enter_context(_libraries_loading())
        nursery = stack.enter_context(Nursery())
        with drawn() as progress:
            files = resolve(_MODEL, progress=progress)
        blocks = files.blocks
        if servers > blocks:
            raise BadRequest(f"{files.name} has {blocks} blocks; more servers than that find nothing to hold")
        bounds = [blocks * number // servers for number in range(servers + 1)]
        spans = list(itertools.pairwise(bounds))
        with _bars(spans) as changed:
            swarm = LocalSwarm(_MODEL, spans, options=["--dtype", dtype], changed=changed, nursery=nursery)
            stack.enter_context(swarm)
            loaded.wait()
        model = stack.enter_context(LanguageModel.open(_MODEL, swarm.initial_peers, dtype=dtype, notice=remark))
        remark(f"Ready after {time.perf_counter() - began:.1f} s. See who holds what with")
        remark(f"  {_own_name()} status --initial-peers {swarm.initial_peers[0]}")
        chat = Chat(stack.enter_context(contextlib.closing(Conversation(model, notice=remark))), model)
        if question is None and at_a_terminal():
            if url := stack.enter_context(api_beside(model, _MODEL)):
                remark(f"Or chat in a browser at {url}/; programs find an API like OpenAI's at {url}/v1")
            chat.talk()
        else:
            typer.echo(f"> {question or _QUESTION}")
            chat.ask(question or _QUESTION)


@contextlib.contextmanager
def _libraries_loading() -> Iterator[threading.Event]:
    """Import what the client needs in a thread: it takes as long as for the servers. Yields what tells when it has."""
    tried = threading.Event()

    def load() -> None:
        with contextlib.suppress(Exception):  # it will be tried again, where somebody hears of it
            load_libraries()
        tried.set()

    thread = threading.Thread(target=load, name="libraries", daemon=True)
    thread.start()
    with process.abandoning(thread):
        yield tried


@contextlib.contextmanager
def _bars(spans: Sequence[tuple[int, int]]) -> Iterator[Callable[[LocalServer], None]]:
    """A bar for each server, drawn on by what is yielded; without a terminal, one line for all."""
    from rich import progress as rich
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        console.print(f"starting {len(spans)} servers ...")
        yield lambda server: None
        return
    columns = (rich.SpinnerColumn(finished_text="✓"), rich.TextColumn("{task.description}"), rich.BarColumn(30))
    with rich.Progress(*columns, rich.TextColumn("{task.fields[stage]}"), console=console) as bars:
        tasks = {
            span: bars.add_task("server for blocks {}:{}".format(*span), total=_STAGES, stage="loading libraries")
            for span in spans
        }

        def show(server: LocalServer) -> None:
            done = _STAGES if server.addresses else min(len(server.stages), _STAGES) - 1
            stage = f"ready after {server.start_seconds:.1f} s" if server.addresses else server.stages[-1]
            bars.update(tasks[server.blocks], completed=done, stage=stage)

        yield show


def _own_name() -> str:
    """How this command was called."""
    called = sys.argv[0]
    return "lilliput" if called.endswith(".py") or shutil.which("lilliput") == called else called
