"""Prompts are scored: how likely the model finds their tokens is what one process's transformers say."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest
import torch
from gateways import Gateway
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from lilliput.gateway.echo import Echo
from lilliput.gateway.vocabulary import Vocabulary
from lilliput.models.sources import ModelFiles

MODEL = "SmolLM2-135M-Instruct"
TEXT = "The capital of France is Paris, and that of Japan is Tokyo. Grüße, 世界 👩‍👩‍👧‍👦! "


@pytest.fixture(scope="module")
def tokenizer(demo_model: ModelFiles) -> Any:
    return AutoTokenizer.from_pretrained(demo_model.path)


@dataclass(frozen=True)
class Expected:
    """What transformers say of some tokens.

    :ivar scores: of each token after the first
    :ivar best: for each of these, what the likeliest three have, `[tokens - 1, 3]`
    """

    scores: list[float]
    best: torch.Tensor


@pytest.fixture(scope="module")
def expected(demo_model: ModelFiles) -> Callable[[list[int]], Expected]:
    whole = AutoModelForCausalLM.from_pretrained(demo_model.path, dtype=torch.float32)
    known: dict[tuple[int, ...], Expected] = {}

    def expected(ids: list[int]) -> Expected:
        if tuple(ids) not in known:
            with torch.inference_mode():
                logits = whole(torch.tensor([ids])).logits[0, :-1]
            totals = logits.logsumexp(-1, keepdim=True)
            scores = (logits.gather(1, torch.tensor(ids[1:])[:, None]) - totals)[:, 0].tolist()
            known[tuple(ids)] = Expected(scores, logits.topk(3).values - totals)
        return known[tuple(ids)]

    return expected


def check(said: Any, expected: Expected, top: int) -> None:
    """`said`, a response's `logprobs`, is right for the tokens that it begins with."""
    assert said["token_logprobs"][0] is None
    assert said["top_logprobs"][0] is None
    count = len(expected.scores)
    assert said["token_logprobs"][1 : count + 1] == pytest.approx(expected.scores, abs=1e-4)
    for likeliest, best in zip(said["top_logprobs"][1 : count + 1], expected.best.tolist(), strict=True):
        values = sorted(likeliest.values(), reverse=True)[:top]
        assert len(values) < top or values == pytest.approx(best[:top], abs=1e-4)  # parts of characters look alike
        assert len(likeliest) <= top + 1  # the token itself, too


@pytest.mark.parametrize("top", [0, 3])
def test_a_text_is_scored_without_an_answer(client: openai.OpenAI, expected: Any, tokenizer: Any, top: int) -> None:
    answer = client.completions.create(model=MODEL, prompt=TEXT, max_tokens=0, echo=True, logprobs=top)
    ids = tokenizer(TEXT)["input_ids"]
    choice = answer.choices[0].model_dump()
    assert (choice["text"], choice["finish_reason"]) == (TEXT, "length")
    said = choice["logprobs"]
    check(said, expected(ids), top)
    assert len(said["tokens"]) == len(said["text_offset"]) == len(said["token_logprobs"]) == len(ids)
    spans = tokenizer(TEXT, return_offsets_mapping=True)["offset_mapping"]
    assert said["text_offset"] == [begin for begin, _ in spans]
    assert "".join(said["tokens"]).startswith("The capital of France is Paris, and that of Japan is Tokyo. Grüße,")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), 0)


def test_what_servers_have_in_their_caches_is_scored_again(
    client: openai.OpenAI, expected: Any, tokenizer: Any
) -> None:
    text = "".join(f"{n} times {n} is {n * n}. " for n in range(40))
    ids = tokenizer(text)["input_ids"]
    options: dict[str, Any] = {"model": MODEL, "prompt": ids, "temperature": 0, "max_tokens": 3}
    plain = [client.completions.create(**options) for _ in range(2)]
    assert plain[1].usage.prompt_tokens_details.cached_tokens > 300
    for _ in range(2):
        answer = client.completions.create(**options, echo=True, logprobs=1).choices[0]
        check(answer.model_dump()["logprobs"], expected(ids), 1)
        assert answer.text == text + plain[0].choices[0].text


def test_a_prompt_of_many_parts_and_several_answers_to_it(client: openai.OpenAI, expected: Any, tokenizer: Any) -> None:
    ids = (tokenizer("One day a fox met a crow, and said to it: ")["input_ids"] * 50)[:601]
    answer = client.completions.create(model=MODEL, prompt=ids, max_tokens=2, n=3, seed=1, echo=True, logprobs=2)
    for choice in answer.choices:
        said = choice.model_dump()["logprobs"]
        check(said, expected(ids), 2)
        assert len(said["tokens"]) == len(ids) + 2
        assert "".join(said["tokens"]) == choice.text
        assert said["text_offset"] == [len("".join(said["tokens"][:n])) for n in range(len(ids) + 2)]
    assert answer.choices[0].logprobs.token_logprobs[:601] == answer.choices[2].logprobs.token_logprobs[:601]  # type: ignore


def test_prompts_in_all_forms_whole_and_streamed(client: openai.OpenAI, expected: Any, tokenizer: Any) -> None:
    texts = [TEXT, "Hello", "Once upon a time, " * 20]
    lists = [tokenizer(text)["input_ids"] for text in texts]
    options: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 4, "echo": True, "logprobs": 1}
    for prompt in (texts, lists):
        answer = client.completions.create(prompt=prompt, **options)
        pieces: list[Any] = [[] for _ in texts]
        for chunk in client.completions.create(prompt=prompt, stream=True, **options):
            pieces[chunk.choices[0].index].append(chunk.choices[0])
        for text, ids, choice, streamed in zip(texts, lists, answer.choices, pieces, strict=True):
            assert choice.text.startswith(text)
            said = choice.model_dump()["logprobs"]
            check(said, expected(ids), 1)
            assert "".join(piece.text for piece in streamed) == choice.text
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                together = [value for piece in streamed if piece.logprobs for value in getattr(piece.logprobs, name)]
                if "logprobs" in name:  # computed twice
                    assert [of if of is None else pytest.approx(of, abs=1e-4) for of in said[name]] == together
                else:
                    assert together == said[name]
            assert max(len(piece.logprobs.tokens) for piece in streamed) <= 64


def test_as_the_evaluation_harness_asks_and_reads(gateway: Gateway, expected: Any, tokenizer: Any) -> None:
    """lm-evaluation-harness, model type `local-completions`, scores continuations of contexts with such requests."""
    pairs = [
        ("The capital of France is", " Paris"),
        ("The capital of France is", " a fish"),
        ("One, two, three,", " four"),
    ]
    split = [(tokenizer(context)["input_ids"], tokenizer(rest)["input_ids"]) for context, rest in pairs]
    split.append((tokenizer("What? <|im_end|>")["input_ids"][:-1], tokenizer("<|im_end|>")["input_ids"]))
    request = {
        "model": "smollm2",
        "prompt": [context + rest for context, rest in split],
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
        "temperature": 0,
    }
    answer = httpx.post(f"{gateway.url}/v1/completions", json=request, timeout=60)
    assert answer.status_code == 200
    choices = sorted(answer.json()["choices"], key=lambda choice: choice["index"])
    for (context, rest), choice in zip(split, choices, strict=True):
        said = choice["logprobs"]
        # one more, which was generated, and is cut off: also where it ends the answer
        logprobs, tops = (said[name][len(context) : -1] for name in ("token_logprobs", "top_logprobs"))
        right = expected(context + rest)
        own, best = right.scores[-len(rest) :], right.best[-len(rest) :, 0].tolist()
        assert sum(logprobs) == pytest.approx(sum(own), abs=1e-4)
        assert all(logprob == max(top.values()) for logprob, top in zip(logprobs, tops, strict=True)) == (own == best)
    assert [choice["text"].startswith(context) for (context, _), choice in zip(pairs, choices, strict=False)] == [
        True
    ] * 3
    json.dumps(answer.json(), allow_nan=False)


def test_a_tokenizer_may_begin_with_more_than_the_text() -> None:
    words = ["<s>", "\u2581Hello", "\u2581", "<0xC3>", "<0xBC>", "ber"]
    model = WordLevel({word: id for id, word in enumerate(words)}, unk_token="<s>")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), bos_token="<s>")
    echo = Echo("Hello über", range(len(words)), Vocabulary(tokenizer), top=0)
    for place in range(0, 5, 2):
        echo.read(place, torch.zeros(min(2, 5 - place), len(words)))
    (piece,) = echo.pieces()
    assert piece.text == "Hello über"
    assert [token.offset for token in piece.tokens] == [0, 0, 5, 6, 6, 7]
    assert [token.likelihood is None for token in piece.tokens] == [True] + [False] * 5
