"""Text comes in whole characters, and with the space that it begins with."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from lilliput.client.detokenizer import Detokenizer
from lilliput.models.sources import ModelFiles

TEXT = " Grüße 世界 👩‍👩‍👧‍👦🎉."


@pytest.fixture(scope="module")
def tokenizer(demo_model: ModelFiles) -> Any:
    return AutoTokenizer.from_pretrained(demo_model.path)


def test_whole_characters(tokenizer: Any) -> None:
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.take([token]) for token in tokenizer(TEXT)["input_ids"]]
    assert "".join(pieces) == TEXT
    assert not any("\ufffd" in piece for piece in pieces)
    assert detokenizer.tokens == tokenizer(TEXT)["input_ids"]


def test_what_never_becomes_a_character_does_not_hold_up_the_rest(tokenizer: Any) -> None:
    half = tokenizer("🎉")["input_ids"][:1]
    detokenizer = Detokenizer(tokenizer)
    assert "\ufffd" in "".join(detokenizer.take(half) for _ in range(20))


def test_a_text_that_continues_another() -> None:
    words = {"\u2581one": 0, "\u2581two": 1}
    backend = Tokenizer(models.WordLevel(words, unk_token="\u2581one"))
    backend.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert Detokenizer(tokenizer).take([1]) == "two"
    assert Detokenizer(tokenizer, before=[0]).take([1]) == " two"
