"""A conversation goes on: with what the servers remember, past its length, and past the death of a server."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from lilliput.cli.answer import Answer
from lilliput.cli.conversation import Conversation
from lilliput.cli.language_model import LanguageModel
from lilliput.cli.local_swarm import LocalSwarm
from lilliput.cli.nursery import Nursery
from lilliput.errors import BadRequest, ModelError
from lilliput.models.sources import ModelFiles

LIMIT = 512
#: about 140 tokens
LONG = "Remember these numbers: " + " ".join(str(number) for number in range(100, 130)) + "."


@pytest.fixture(scope="module")
def small(demo_model: ModelFiles, nursery: Nursery) -> Iterator[LocalSwarm]:
    """Servers with little room."""
    options = ["--max-length", str(LIMIT), "--cache-tokens", str(LIMIT)]
    with LocalSwarm("smollm2", [(0, 15), (15, 30)], options=options, nursery=nursery) as swarm:
        yield swarm


@pytest.fixture
def notices() -> list[str]:
    return []


@pytest.fixture
def model(small: LocalSwarm, notices: list[str]) -> Iterator[LanguageModel]:
    with LanguageModel.open("smollm2", small.initial_peers, notice=notices.append) as model:
        yield model


@pytest.fixture
def conversation(model: LanguageModel, notices: list[str]) -> Iterator[Conversation]:
    conversation = Conversation(model, max_new_tokens=8, options={"do_sample": False}, notice=notices.append)
    yield conversation
    conversation.close()


def ask(conversation: Conversation, question: str, write: Callable[[str], None] = lambda text: None) -> str:
    answer = Answer(conversation._model.tokenizer, write)
    conversation.ask(question, answer)
    return answer.text


def computed(conversation: Conversation) -> int:
    assert conversation.session is not None
    return conversation.session.stats[0].computed_tokens


def test_the_next_turn_computes_only_what_is_new(conversation: Conversation) -> None:
    assert ask(conversation, f"{LONG} What is the capital of France?")
    before = computed(conversation)
    assert before > 100
    session = conversation.session
    assert ask(conversation, "And of Italy?")
    assert conversation.session is session
    assert computed(conversation) - before < 40


def test_who_resets_begins_anew(conversation: Conversation) -> None:
    first = ask(conversation, "What is the capital of France?")
    ask(conversation, "And of Italy?")
    conversation.reset()
    assert conversation.turns == []
    assert ask(conversation, "What is the capital of France?") == first


def test_the_oldest_turns_make_room(conversation: Conversation, notices: list[str]) -> None:
    for number in range(4):
        assert ask(conversation, f"{number}. {LONG}")
    assert notices
    assert notices[0].startswith(f"the conversation is longer than the {LIMIT} tokens it may have")
    assert 0 < len(conversation.turns) < 4
    assert conversation.turns[-1].question.startswith("3.")


def test_they_make_room_too_where_the_servers_have_none(
    conversation: Conversation, model: LanguageModel, notices: list[str]
) -> None:
    room = 320
    question = "Listen."
    while len(model.encode_chat([{"role": "user", "content": question}])) < room - 20:
        question += " Go on."
    ask(conversation, "Hello!")
    with model.session(LIMIT - room) as other:
        model.generate(model.encode("somebody else"), other, None, max_new_tokens=1)
        assert ask(conversation, question)
    assert "its oldest turn was dropped" in notices[0]
    assert len(conversation.turns) == 1


def test_a_question_that_is_too_long(conversation: Conversation) -> None:
    first = ask(conversation, "What is the capital of France?")
    with pytest.raises(BadRequest, match=rf"SmolLM2-135M-Instruct and its servers take {LIMIT}$"):
        ask(conversation, "la " * LIMIT)
    assert conversation.turns == []
    assert ask(conversation, "What is the capital of France?") == first


def test_a_stopped_answer_stays_as_far_as_it_came(conversation: Conversation) -> None:
    said: list[str] = []

    def write(piece: str) -> None:
        said.append(piece)
        if len(said) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ask(conversation, "What is the capital of France?", write)
    assert conversation.turns[0].answer == "".join(said)
    assert ask(conversation, "Go on.")


def test_an_answer_outlives_a_server(small: LocalSwarm, conversation: Conversation, notices: list[str]) -> None:
    expected = ask(conversation, "What is the capital of France?")
    conversation.reset()
    victim, said = small.servers[-1], []
    starting: list[threading.Thread] = []

    def kill(piece: str) -> None:
        said.append(piece)
        if len(said) == 2:
            os.kill(victim.pid, signal.SIGKILL)
            starting.append(threading.Thread(target=small.add, args=[(15, 30)]))
            starting[0].start()

    assert ask(conversation, "What is the capital of France?", kill) == expected
    starting[0].join()
    assert len(notices) == 1
    assert notices[0].startswith(f"blocks 15:30 went from {victim.peer_id[-8:]} to {small.servers[-1].peer_id[-8:]} in")
    assert ask(conversation, "Go on.")


def test_a_model_that_was_not_made_to_talk() -> None:
    tokenizer: Any = SimpleNamespace(chat_template=None)
    with pytest.raises(ModelError, match="has no chat template"):
        LanguageModel("m", None, tokenizer, None, print).encode_chat([])
