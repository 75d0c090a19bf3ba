"""Answers come in whole characters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from lilliput.cli.answer import Answer
from lilliput.models.sources import ModelFiles

TEXT = "Grüße, Jürgen! 世界は広い — 👩‍👩‍👧‍👦🎉 naïve\n\n\tdéjà  vu…  done"


@pytest.fixture(scope="module")
def tokenizer(demo_model: ModelFiles) -> Any:
    return AutoTokenizer.from_pretrained(demo_model.path)


def pieces(tokenizer: Any, tokens: list[int]) -> tuple[Answer, list[str]]:
    said: list[str] = []
    answer = Answer(tokenizer, said.append)
    answer.put(torch.tensor([[1, 2, 3]]))  # the prompt
    for token in tokens:
        answer.put(torch.tensor([token]))
    answer.end()
    return answer, said


def test_no_character_is_cut(tokenizer: Any) -> None:
    answer, said = pieces(tokenizer, tokenizer(TEXT)["input_ids"])
    assert "".join(said) == answer.text == TEXT
    assert not any("\ufffd" in piece for piece in said)
    assert len(said) > 20


def test_half_a_character_at_the_end_is_left_out(tokenizer: Any) -> None:
    answer, _ = pieces(tokenizer, tokenizer("well 🎉")["input_ids"][:-1])
    assert answer.text.rstrip() == "well"


def test_the_end_of_the_answer_is_no_text(tokenizer: Any) -> None:
    answer, said = pieces(tokenizer, [*tokenizer("Yes.")["input_ids"], tokenizer.eos_token_id])
    assert ("".join(said), len(answer.tokens)) == ("Yes.", 3)


def test_its_pace(tokenizer: Any) -> None:
    answer, _ = pieces(tokenizer, [])
    assert answer.pace == "no tokens"
    answer, _ = pieces(tokenizer, tokenizer("Yes")["input_ids"])
    assert answer.pace.startswith("1 token, ")
    answer, _ = pieces(tokenizer, tokenizer("Yes, of course")["input_ids"])
    assert answer.pace.startswith("4 tokens, ")
    assert answer.tokens_per_second > 0
