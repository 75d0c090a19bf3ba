"""Every parameter of OpenAI's own client is honoured, changes nothing, or is refused by its name."""

from __future__ import annotations

import inspect
from typing import Any

import openai
import pytest
from gateways import KEYS, Gateway
from openai.resources.chat.completions import Completions as ChatCompletions
from openai.resources.completions import Completions
from pydantic import ValidationError

from lilliput.gateway.requests import ChatRequest, CompletionRequest, Request

MODEL = "SmolLM2-135M-Instruct"
QUESTION: Any = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
#: of the client, not of the request
CLIENTS_OWN = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}

#: values that are taken: by what the answer depends on, and by what it does not
HONOURED: dict[str, list[Any]] = {
    "messages": [QUESTION, [*QUESTION, {"role": "assistant", "content": "Hello", "tool_calls": []}, *QUESTION]],
    "prompt": ["Hi", ["Hi", "Ho"], [1, 2], [[1], [2]]],
    "model": [MODEL],
    "best_of": [1],
    "echo": [True],
    "frequency_penalty": [0.5],
    "logit_bias": [{}, {"5": -100}],
    "max_completion_tokens": [5],
    "max_tokens": [5],
    "n": [2],
    "parallel_tool_calls": [True, False],
    "presence_penalty": [0.5],
    "reasoning_effort": ["none", "minimal", "low", "medium", "high", "xhigh", "max"],
    "response_format": [{"type": "text"}, {"type": "json_object"}],
    "seed": [1],
    "stop": ["x", ["x", "y"], []],
    "stream": [True, False],
    "temperature": [0, 0.5],
    "tool_choice": ["none", "auto"],
    "tools": [[], [TOOL]],
    "top_p": [0.5],
}
TOGETHER: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": True},
    "top_logprobs": {"logprobs": True, "top_logprobs": 3},
    "stream_options": {"stream": True, "stream_options": {"include_usage": True}},
}
CHANGES_NOTHING: dict[str, list[Any]] = {
    "metadata": [{}, {"task": "greeting"}],
    "modalities": [["text"]],
    "prediction": [{"type": "content", "content": "Hello"}],
    "prompt_cache_key": ["a"],
    "prompt_cache_options": [{"mode": "implicit", "ttl": "30m"}],
    "prompt_cache_retention": ["in_memory", "24h"],
    "safety_identifier": ["a"],
    "service_tier": ["auto", "default", "flex", "priority"],
    "store": [False],
    "user": ["a"],
    "verbosity": ["medium"],
}
REFUSED: dict[str, list[Any]] = {
    "audio": [{"format": "wav", "voice": "alloy"}],
    "function_call": ["auto"],
    "functions": [[{"name": "look"}]],
    "modalities": [["text", "audio"]],
    "moderation": [{"model": "x"}],
    "store": [True],
    "suffix": ["."],
    "verbosity": ["low", "high"],
    "web_search_options": [{}],
}


@pytest.mark.parametrize(
    ("create", "request_type"), [(ChatCompletions.create, ChatRequest), (Completions.create, CompletionRequest)]
)
def test_every_parameter_of_the_client_is_decided(create: Any, request_type: type[Request]) -> None:
    usual: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "prompt": "Hi"}
    usual.pop("prompt" if request_type is ChatRequest else "messages")
    names = set(inspect.signature(create).parameters) - CLIENTS_OWN
    assert names - {*HONOURED, *TOGETHER, *CHANGES_NOTHING, *REFUSED} == set()
    for name in names:
        if name == "logprobs" and request_type is CompletionRequest:
            request_type.model_validate(usual | {"logprobs": 3})
        elif name in TOGETHER:
            request_type.model_validate(usual | TOGETHER[name])
        for value in [*HONOURED.get(name, []), *CHANGES_NOTHING.get(name, []), None]:
            if value is not None or name not in usual:  # null is as good as nothing
                request_type.model_validate(usual | {name: value})
        for value in REFUSED.get(name, []):
            with pytest.raises(ValidationError) as refused:
                request_type.model_validate(usual | {name: value})
            assert refused.value.errors()[0]["loc"][0] == name


def test_what_changes_nothing_changes_nothing(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "max_tokens": 8, "temperature": 0}
    plain = client.chat.completions.create(**options)
    ignored = {name: values[-1] for name, values in CHANGES_NOTHING.items()}
    nothing: dict[str, Any] = {"tools": [], "tool_choice": "auto", "reasoning_effort": "low"}
    other = client.chat.completions.create(**options, **ignored, **nothing)
    assert other.choices[0].message.content == plain.choices[0].message.content
    assert (other.usage and other.usage.prompt_tokens) == (plain.usage and plain.usage.prompt_tokens)


@pytest.mark.parametrize(("name", "value"), [("store", True), ("verbosity", "high"), ("audio", {})])
def test_what_is_refused_is_named(client: openai.OpenAI, name: str, value: Any) -> None:
    with pytest.raises(openai.BadRequestError, match=f"'{name}'") as refused:
        client.chat.completions.create(model=MODEL, messages=QUESTION, extra_body={name: value})
    assert refused.value.param == name


def test_a_template_that_knows_of_reasoning_is_told(guarded: Gateway) -> None:
    client = guarded.client(KEYS[0])

    def prompt_tokens(**options: Any) -> int:
        answer = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=1, **options)
        assert answer.usage is not None
        return answer.usage.prompt_tokens

    usual = prompt_tokens()
    assert prompt_tokens(reasoning_effort="high") > usual
    assert prompt_tokens(reasoning_effort="none") > usual
