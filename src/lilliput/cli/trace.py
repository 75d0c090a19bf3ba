"""`lilliput trace`: where each millisecond of one answer goes, server by server."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lilliput.cli import process
from lilliput.cli.language_model import LanguageModel
from lilliput.cli.logs import Verbose
from lilliput.cli.options import Adapter, InitialPeers, Model, Revision, SwarmKeyFile, Token, TrustedPeers
from lilliput.cli.output import remark
from lilliput.errors import BadRequest

if TYPE_CHECKING:
    from lilliput.client.answer_trace import Spent
    from lilliput.client.recovery import Recovery

#: what else than servers' time is called for a person
_NAMES = {
    "back": "way back",
    "embedding": "embedding, here",
    "head": "head, choice of a token, here",
    "opening": "opening sessions",
    "waiting": "waiting for the head's thread",
    "moving": "the session moved",
    "recovering": "others took over",
    "lost": "lost in what failed",
    "auditing": "others check what came",
    "rest": "not accounted for",
}


def trace(
    model: Model,
    initial_peers: InitialPeers = None,
    swarm_key: SwarmKeyFile = None,
    trusted_peers: TrustedPeers = None,
    prompt: Annotated[str, typer.Option("--prompt", "-p", metavar="TEXT", help="The text.")] = "Once upon a time",
    new_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="How many tokens follow it.")] = 24,
    push: Annotated[
        bool, typer.Option(help="Servers send straight to the next one. If not, each one's network is measured.")
    ] = True,
    dtype: Annotated[
        str | None, typer.Option(help="Of the model's ends and of what is sent.", show_default="the checkpoint's")
    ] = None,
    adapter: Adapter = "",
    revision: Revision = None,
    token: Token = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    verbose: Verbose = 0,
) -> None:
    """Generate a short text, and show where each millisecond of it went."""
    process.prepare()
    with LanguageModel.open(
        model,
        initial_peers,
        swarm_key=swarm_key,
        trusted_peers=trusted_peers or (),
        dtype=dtype,
        adapter=adapter,
        revision=revision,
        token=token,
        notice=remark,
    ) as language_model:
        ids = language_model.encode(prompt)
        if not ids:
            raise BadRequest("There is no text: give it with --prompt.")
        found = _generate(language_model, ids, new_tokens, push)
    if as_json:
        print(json.dumps(found.facts(), indent=2))
    else:
        _show(found)


@dataclass(frozen=True)
class _Found:
    """An answer and where its time went. Times in seconds."""

    model: str
    request_id: str
    prompt_tokens: int
    tokens: int
    first: float
    seconds: float
    spent: list[Spent]
    recoveries: list[Recovery]

    def facts(self) -> dict[str, Any]:
        from lilliput.client.answer_trace import facts

        return {
            "model": self.model,
            "request_id": self.request_id,
            "prompt_tokens": self.prompt_tokens,
            "tokens": self.tokens,
            "first_ms": self.first * 1e3,
            "total_ms": self.seconds * 1e3,
            "parts": facts(self.spent),
            "recoveries": [asdict(recovery) for recovery in self.recoveries],
        }


def _generate(language_model: LanguageModel, ids: list[int], new_tokens: int, push: bool) -> _Found:
    from lilliput.client.answer_trace import AnswerTrace
    from lilliput.client.async_session import AsyncInferenceSession
    from lilliput.client.decoder import Decoder
    from lilliput.wire import request_id

    async def answer() -> _Found:
        remote = replace(decoder.remote, push=push)
        seen, name = AnswerTrace(), request_id.new()
        session = AsyncInferenceSession(
            remote, max_length=len(ids) + new_tokens, request_id=name, on_step=seen.saw_step
        )
        try:
            async for _ in decoder.stream(ids, max_new_tokens=new_tokens, session=session, on_ends=seen.saw_ends):
                pass
            ways = await remote.connection.round_trips([hop.record for hop in session.hops], within=0.0)
        finally:
            await session.close()
        times = seen.first_seconds, seen.seconds
        return _Found(language_model.name, name, len(ids), seen.tokens, *times, seen.spent(ways), session.recoveries)

    decoder = Decoder(language_model.distributed)
    try:
        return decoder.run(answer())
    finally:
        decoder.close()


def _show(found: _Found) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    console.print(
        Text.assemble(
            (found.model, "bold"),
            f": {found.prompt_tokens} tokens read, {found.tokens} written in {found.seconds:.2f} s",
        )
    )
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("milliseconds", no_wrap=True)
    for heading in ("first token", "others", "at most", "all", ""):
        table.add_column(heading, justify="right", no_wrap=True)
    peer = ""
    for one in found.spent:
        place = one.place
        if place.peer_id != peer and place.peer_id:
            table.add_row(Text(f"{place.peer_id[-8:]}, blocks {place.start}:{place.end}", "bold"))
        peer = place.peer_id
        name = f"  {place.name}" if peer else _NAMES[place.name]
        share = f"{100 * one.total / found.seconds:.0f} %"
        times = one.first, one.median, one.most, one.total
        table.add_row(name + (" ~" if one.estimated else ""), *map(_short, times), share)
    whole = sum(one.first for one in found.spent), sum(one.total for one in found.spent)
    table.add_row("all", _short(whole[0]), "", "", _short(whole[1]), "", style="bold")
    console.print(table)
    if any(one.estimated for one in found.spent):
        console.print("~ shared out: only the sum of these ways is measured. --no-push measures each.", style="dim")
    for recovery in found.recoveries:
        console.print(f"{recovery}: {recovery.why}", style="dim")
    console.print(f"The servers' logs (serve -v) have it as request {found.request_id}.", style="dim")


def _short(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"
