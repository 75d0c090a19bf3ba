"""Tools: calls are found in answers, and a model that knows no tools is not asked to use them."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from gateways import Gateway

from lilliput.gateway.tools import CallReader

MODEL = "SmolLM2-135M-Instruct"
QUESTION: list[Any] = [{"role": "user", "content": "How is the weather in Paris?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


def test_a_call(guarded: Gateway) -> None:
    client = guarded.client()
    choice: Any = {"type": "function", "function": {"name": "get_weather"}}
    options: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "tools": [WEATHER], "temperature": 0}
    answer = client.chat.completions.create(**options, tool_choice=choice, max_tokens=60)
    assert answer.choices[0].finish_reason == "tool_calls"
    message = answer.choices[0].message
    assert message.content is None
    assert message.tool_calls is not None
    call = message.tool_calls[0].function  # type: ignore[union-attr]
    assert call.name == "get_weather"
    assert json.loads(call.arguments)["city"] == "Paris"

    chunks = list(client.chat.completions.create(**options, tool_choice=choice, max_tokens=60, stream=True))
    deltas = [delta for chunk in chunks for delta in chunk.choices[0].delta.tool_calls or []]
    assert [(delta.index, delta.function.arguments) for delta in deltas] == [(0, call.arguments)]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"

    result: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    options["messages"] = [*QUESTION, message.model_dump(exclude_none=True), result]
    last = client.chat.completions.create(**options, tool_choice="none", max_tokens=4)
    assert last.choices[0].message.content


def test_a_model_without_tools(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=QUESTION, tools=[WEATHER])
    assert refused.value.param == "tools"


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_calls_are_found_however_the_text_comes(size: int) -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"a": "<b>"}}\n</tool_call>'
    broken = "<tool_call>f()</tool_call>"
    text = f"1 < 2 <tool_\n{call}\n{call}{broken} end <tool"
    reader = CallReader(["f"])
    shown, calls = "", []
    for start in range(0, len(text), size):
        more, found = reader.take(text[start : start + size])
        shown += more
        calls += found
    last, found = reader.rest()
    assert (shown + last).split() == ["1", "<", "2", "<tool_", "<tool_call>f()</tool_call>", "end", "<tool"]
    assert [(c.name, json.loads(c.arguments)) for c in calls + found] == [("f", {"a": "<b>"})] * 2
