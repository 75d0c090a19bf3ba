"""Requests made up from the published description, right ones and wrong ones: no answer is a 500."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from gateways import KEYS, Gateway
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode

MODEL = "SmolLM2-135M-Instruct"
EXAMPLES = 12


@pytest.fixture(scope="module")
def description(guarded: Gateway) -> Any:
    return schemathesis.openapi.from_url(f"{guarded.url}/openapi.json")


@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_no_request_breaks_it(description: Any, path: str, mode: GenerationMode) -> None:
    statuses = set()

    @settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(case=description[path]["POST"].as_strategy(generation_mode=mode))
    def call(case: Any) -> None:
        if mode is GenerationMode.POSITIVE:
            _make_sense(case.body)
        answer = case.call(headers={"Authorization": f"Bearer {KEYS[0]}"}, timeout=60)
        statuses.add(answer.status_code)
        assert answer.status_code < 500
        if answer.status_code >= 400:
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

    call()
    assert statuses & ({200} if mode is GenerationMode.POSITIVE else {400, 415})


def _make_sense(body: Any) -> None:
    """Without what the description cannot tell: that the model has a name, and what goes together with what."""
    body |= {"model": MODEL, "n": 1, "max_tokens": 2}
    for name in ("max_completion_tokens", "stream_options", "top_logprobs", "tool_choice", "logit_bias", "best_of"):
        body.pop(name, None)
    for message in body.get("messages", []):
        message.setdefault("content", "x")
        if message["role"] != "assistant":
            message.pop("tool_calls", None)
    if body.get("tools"):
        body.pop("response_format", None)
