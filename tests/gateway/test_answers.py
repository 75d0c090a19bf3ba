"""Answers, as OpenAI's own client gets them."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lilliput.models.sources import ModelFiles

MODEL = "SmolLM2-135M-Instruct"
QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
STORY = "Once upon a time, in a land far"


@pytest.fixture(scope="module")
def tokenizer(demo_model: ModelFiles) -> Any:
    return AutoTokenizer.from_pretrained(demo_model.path)


@pytest.fixture(scope="module")
def story(client: openai.OpenAI) -> str:
    """How the likeliest story goes on."""
    return client.completions.create(model=MODEL, prompt=STORY, temperature=0, max_tokens=8).choices[0].text


def test_chat_whole_and_streamed(client: openai.OpenAI, tokenizer: Any) -> None:
    whole = client.chat.completions.create(model="smollm2", messages=QUESTION, temperature=0)
    assert whole.choices[0].message.content == "The capital of France is Paris."
    assert (whole.model, whole.object, whole.choices[0].finish_reason) == (MODEL, "chat.completion", "stop")
    prompt = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=False)
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len(tokenizer(prompt)["input_ids"])
    assert whole.usage.completion_tokens == len(tokenizer(whole.choices[0].message.content)["input_ids"])
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens

    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": [{"type": "text", "text": QUESTION[0]["content"]}]}],
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks[:-1] if c.choices[0].finish_reason] == ["stop"]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


def test_the_servers_remember_earlier_turns(client: openai.OpenAI) -> None:
    talk = [{"role": "system", "content": "You answer in one short sentence. " * 6}, *QUESTION]
    first = client.chat.completions.create(model=MODEL, messages=talk, temperature=0, max_completion_tokens=24)
    talk += [{"role": "assistant", "content": first.choices[0].message.content}, {"role": "user", "content": "Why?"}]
    second = client.chat.completions.create(model=MODEL, messages=talk, temperature=0, max_completion_tokens=4)
    assert first.usage is not None
    assert second.usage is not None
    cached = second.usage.prompt_tokens_details.cached_tokens  # type: ignore[union-attr]
    assert first.usage.prompt_tokens - 16 <= cached < second.usage.prompt_tokens
    assert second.choices[0].finish_reason == "length"
    assert second.usage.completion_tokens == 4


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_may_cross_tokens(client: openai.OpenAI, tokenizer: Any, story: str, stream: bool) -> None:
    words = [tokenizer.decode([token]) for token in tokenizer(story)["input_ids"]]
    stop = words[2][-2:] + words[3] + words[4] + words[5][:2]
    assert story.count(stop) == 1
    answer = client.completions.create(
        model=MODEL, prompt=STORY, temperature=0, max_tokens=8, stop=["never to be seen", stop], stream=stream
    )
    parts = list(answer) if stream else [answer]
    assert "".join(part.choices[0].text for part in parts) == story[: story.index(stop)]
    assert parts[-1].choices[0].finish_reason == "stop"


def test_several_answers(client: openai.OpenAI) -> None:
    def ask(seed: int) -> Any:
        return client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Invent a name for a red cat that lives in a very old castle."}],
            n=3,
            seed=seed,
            temperature=1.2,
            top_p=0.95,
            max_tokens=8,
        )

    first, again = ask(5), ask(5)
    texts = [choice.message.content for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert texts == [choice.message.content for choice in again.choices]
    assert first.usage.prompt_tokens < 80  # counted once
    assert again.usage.prompt_tokens_details.cached_tokens >= 32


def test_prompts_in_all_forms(client: openai.OpenAI, tokenizer: Any, story: str) -> None:
    ids = tokenizer(STORY)["input_ids"]
    for prompt in (ids, [ids], [STORY, STORY]):
        answer = client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=8)
        assert {choice.text for choice in answer.choices} == {story}
    echo = client.completions.create(model=MODEL, prompt=STORY, temperature=0, max_tokens=8, echo=True)
    assert [choice.text for choice in echo.choices] == [STORY + story]
    short = client.completions.create(model=MODEL, prompt=STORY, temperature=0)
    assert short.usage is not None
    assert short.usage.completion_tokens == 16


def test_likelihoods_are_the_models_own(client: openai.OpenAI, demo_model: ModelFiles, tokenizer: Any) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=STORY, temperature=0, max_tokens=6, logprobs=3, logit_bias={"28": -5}, presence_penalty=1
    )
    said = answer.choices[0].logprobs
    assert said is not None
    assert "".join(said.tokens or []) == answer.choices[0].text
    whole = AutoModelForCausalLM.from_pretrained(demo_model.path, dtype=torch.float32)
    prompt = tokenizer(STORY)["input_ids"]
    ids = prompt + tokenizer(answer.choices[0].text)["input_ids"]
    with torch.inference_mode():
        expected = whole(torch.tensor([ids])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    own = [expected[place, token].item() for place, token in enumerate(ids[len(prompt) :])]
    assert said.token_logprobs == pytest.approx(own, abs=1e-3)
    best = expected.topk(3).values
    for place, top in enumerate(said.top_logprobs or []):
        assert sorted(top.values(), reverse=True) == pytest.approx(best[place].tolist(), abs=1e-3)
    starts = [sum(map(len, said.tokens[:n])) for n in range(len(said.tokens or []))]  # type: ignore[index]
    assert said.text_offset == starts

    chat = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=4, logprobs=True, top_logprobs=2
    )
    tokens = chat.choices[0].logprobs.content  # type: ignore[union-attr]
    assert tokens is not None
    assert b"".join(bytes(token.bytes or []) for token in tokens).decode() == chat.choices[0].message.content
    assert all(token.top_logprobs[0].logprob == token.logprob and len(token.top_logprobs) == 2 for token in tokens)


def test_what_is_penalized_does_not_come(client: openai.OpenAI, tokenizer: Any, story: str) -> None:
    first = tokenizer(story)["input_ids"][0]
    options: dict[str, Any] = {"model": MODEL, "prompt": STORY, "temperature": 0, "max_tokens": 4}
    other = client.completions.create(**options, logit_bias={str(first): -100})
    assert not story.startswith(other.choices[0].text)
    forced = client.completions.create(**options, logit_bias={"30": 100})
    assert forced.choices[0].text == tokenizer.decode([30]) * 4
    repeated = client.completions.create(**options, logit_bias={"30": 20}, extra_body={"repetition_penalty": 5.0})
    assert repeated.choices[0].text != forced.choices[0].text
    cold = client.completions.create(**options | {"temperature": 2}, extra_body={"top_k": 1})
    assert story.startswith(cold.choices[0].text)


def test_json_of_a_schema_in_whole_characters(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"age": {"type": "integer", "maximum": 99}, "motto": {"enum": ["Grüße, 世界 👩‍👩‍👧‍👦🎉!"]}},
        "required": ["age", "motto"],
        "additionalProperties": False,
    }
    chunks = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Invent a person."}],
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": schema}},
        max_tokens=80,
        stream=True,
        seed=1,
    )
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert not any("\ufffd" in piece for piece in pieces)
    person = json.loads("".join(pieces))
    assert person["motto"] == schema["properties"]["motto"]["enum"][0]  # type: ignore[index]
    assert person["age"] <= 99
    assert len(pieces) > 10


def test_many_at_once_are_as_right_as_one(client: openai.OpenAI, story: str) -> None:
    def ask(number: int) -> str:
        return client.completions.create(model=MODEL, prompt=STORY, temperature=0, max_tokens=8).choices[0].text

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(ask, range(8))) == {story}
