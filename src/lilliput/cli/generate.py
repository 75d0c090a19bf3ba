"""`lilliput generate`: one text."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lilliput.cli import process, sampling
from lilliput.cli.answer import Answer
from lilliput.cli.language_model import LanguageModel
from lilliput.cli.logs import Verbose
from lilliput.cli.options import Adapter, Audit, InitialPeers, Model, Revision, SwarmKeyFile, Token, TrustedPeers
from lilliput.cli.output import Output, remark
from lilliput.errors import BadRequest

if TYPE_CHECKING:
    from lilliput.client.session import InferenceSession


def generate(
    model: Model,
    initial_peers: InitialPeers = None,
    swarm_key: SwarmKeyFile = None,
    trusted_peers: TrustedPeers = None,
    audit: Audit = 0.0,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", metavar="TEXT", help="The text.", show_default="standard input")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="The text is a question: answer it instead of continuing it.")
    ] = False,
    max_new_tokens: sampling.MaxNewTokens = 256,
    temperature: sampling.Temperature = None,
    top_p: sampling.TopP = None,
    top_k: sampling.TopK = None,
    num_beams: Annotated[
        int, typer.Option(min=1, metavar="N", help="Search with N beams; the text is shown when it is whole.")
    ] = 1,
    seed: sampling.Seed = None,
    dtype: Annotated[
        str | None, typer.Option(help="Of the model's ends and of what is sent.", show_default="the checkpoint's")
    ] = None,
    adapter: Adapter = "",
    revision: Revision = None,
    token: Token = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, when all is there: the text, its pace, servers that were lost.")
    ] = False,
    verbose: Verbose = 0,
) -> None:
    """Continue a text, or answer one question, and leave. Standard output has the new text alone."""
    process.prepare()
    text = _text(prompt)
    output = Output()
    with LanguageModel.open(
        model,
        initial_peers,
        swarm_key=swarm_key,
        trusted_peers=trusted_peers or (),
        audit=audit,
        dtype=dtype,
        adapter=adapter,
        revision=revision,
        token=token,
        notice=remark,
    ) as language_model:
        language_model.seed(seed)
        ids = language_model.encode_chat([{"role": "user", "content": text}]) if chat else language_model.encode(text)
        count = min(max_new_tokens, language_model.max_length() - len(ids))
        if count < 1:
            raise BadRequest(
                f"this text has {len(ids)} tokens; {language_model.name} and its servers take "
                f"{language_model.max_length()}, with what is to come"
            )
        options = sampling.options(temperature, top_p, top_k, num_beams if num_beams > 1 else None)
        answer = Answer(language_model.tokenizer, (lambda piece: None) if as_json else output.write)
        streamer = answer if num_beams == 1 else None  # beams overtake one another: nothing is certain before the end
        try:
            with language_model.session(len(ids) + count, rows=num_beams) as session:
                new = language_model.generate(ids, session, streamer, max_new_tokens=count, **options)
            if streamer is None:
                answer.take(new)
        finally:
            output.end_line()
        if as_json:
            print(json.dumps(_facts(ids, answer, session)))
        elif verbose:
            remark(f"({len(ids)} tokens read; {answer.pace})")
            for recovery in session.recoveries:
                remark(f"{recovery}: {recovery.why}")


def _facts(ids: list[int], answer: Answer, session: InferenceSession) -> dict[str, Any]:
    return {
        "text": answer.text,
        "tokens": answer.tokens,
        "prompt_tokens": len(ids),
        "seconds_to_first": answer.seconds_to_first,
        "tokens_per_second": answer.tokens_per_second,
        "recoveries": [asdict(recovery) for recovery in session.recoveries],
        "audits": asdict(session.audits),
    }


def _text(prompt: str | None) -> str:
    if prompt is None:
        if sys.stdin.isatty():
            raise BadRequest("Give a text with --prompt, or on standard input.")
        prompt = sys.stdin.buffer.read().decode(errors="replace").removesuffix("\n")
    if not prompt.strip():
        raise BadRequest("There is no text: give it with --prompt, or on standard input.")
    return prompt
