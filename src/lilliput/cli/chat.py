"""`lilliput chat`: talk to a model in the swarm."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from lilliput.cli import process, sampling
from lilliput.cli.answer import Answer
from lilliput.cli.conversation import Conversation
from lilliput.cli.language_model import LanguageModel
from lilliput.cli.logs import Verbose
from lilliput.cli.options import Adapter, Audit, InitialPeers, Model, Revision, SwarmKeyFile, Token, TrustedPeers
from lilliput.cli.output import Output, complain, remark
from lilliput.errors import LilliputError

_HELP = "/reset forgets the conversation, /quit leaves; Ctrl-C stops an answer."


def chat(
    model: Model,
    initial_peers: InitialPeers = None,
    swarm_key: SwarmKeyFile = None,
    trusted_peers: TrustedPeers = None,
    audit: Audit = 0.0,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="What the model is told first.", show_default="the model's own")
    ] = None,
    max_new_tokens: sampling.MaxNewTokens = 512,
    temperature: sampling.Temperature = None,
    top_p: sampling.TopP = None,
    top_k: sampling.TopK = None,
    seed: sampling.Seed = None,
    dtype: Annotated[
        str | None, typer.Option(help="Of the model's ends and of what is sent.", show_default="the checkpoint's")
    ] = None,
    adapter: Adapter = "",
    revision: Revision = None,
    token: Token = None,
    verbose: Verbose = 0,
) -> None:
    """Talk to a model that a swarm holds. Without a terminal, answer standard input line by line."""
    process.prepare()
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
        conversation = Conversation(
            language_model,
            system=system,
            max_new_tokens=max_new_tokens,
            options=sampling.options(temperature, top_p, top_k),
            notice=remark,
        )
        with contextlib.closing(conversation):
            if at_a_terminal():
                Chat(conversation, language_model).talk()
            else:
                answer_lines(conversation, language_model, with_pace=verbose > 0)


def at_a_terminal() -> bool:
    """Whether a person sits at both ends."""
    return sys.stdin.isatty() and sys.stdout.isatty()


class Chat:
    """A conversation at a terminal."""

    def __init__(self, conversation: Conversation, model: LanguageModel) -> None:
        self._conversation, self._model, self._output = conversation, model, Output()

    def talk(self) -> None:
        """Ask for questions and answer them, until the person leaves."""
        servers = len(self._model.chain())
        self._output.remark(f"{self._model.name} on {servers} {'server' if servers == 1 else 'servers'}. {_HELP}")
        typed = _line_editor()
        while True:
            try:
                question = input("> ").strip()
            except EOFError:
                self._output.write("\n")
                return
            except KeyboardInterrupt:
                self._output.write("\n")
                if typed():
                    continue  # as in a shell, it drops the line
                return
            if question == "/quit":
                return
            if question == "/reset":
                self._conversation.reset()
            elif question.startswith("/"):
                self._output.remark(_HELP)
            elif question:
                self._answer(question)

    def _answer(self, question: str) -> None:
        try:
            self.ask(question)
        except KeyboardInterrupt:
            pass
        except LilliputError as e:
            complain(f"{e} (the conversation is kept: ask again)")

    def ask(self, question: str) -> None:
        """Answer one question, and say how fast."""
        answer = Answer(self._model.tokenizer, self._output.write)
        try:
            self._conversation.ask(question, answer)
        except KeyboardInterrupt:
            self._output.remark(f"(stopped: {answer.pace})")
            raise
        finally:
            self._output.end_line()
        self._output.remark(f"({answer.pace})")


def _line_editor() -> Callable[[], str]:
    """From now on `input` edits lines and remembers them, if it can. Returns what tells what is typed."""
    try:
        import readline
    except ImportError:
        return str
    return readline.get_line_buffer


def answer_lines(conversation: Conversation, model: LanguageModel, *, with_pace: bool) -> None:
    """Answer the questions that stand in the lines of standard input, and nothing else."""
    output = Output()
    sys.stdin.reconfigure(errors="replace")  # type: ignore[union-attr]
    for line in sys.stdin:
        question = line.strip()
        if question == "/quit":
            return
        if question == "/reset":
            conversation.reset()
        elif question:
            answer = Answer(model.tokenizer, output.write)
            conversation.ask(question, answer)
            output.end_line()
            if with_pace:
                remark(f"({answer.pace})")
