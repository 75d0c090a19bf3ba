"""Requests made up from the published description, right ones and wrong ones: no answer is a 500."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from gateways import KEYS, Gateway
from hypothesis import HealthCheck, settings

MODEL = "SmolLM2-135M-Instruct"


@pytest.fixture(scope="session")
def description(guarded: Gateway) -> Any:
    return schemathesis.openapi.from_url(f"{guarded.url}/openapi.json")


schema = schemathesis.pytest.from_fixture("description")


@schema.parametrize()
@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_no_request_breaks_it(case: Any) -> None:
    if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
        # nearly all others end at the model's name, or take long
        case.body |= {"model": MODEL, "n": 1, "max_tokens": 1}
        case.body.pop("max_completion_tokens", None)
    answer = case.call(headers={"Authorization": f"Bearer {KEYS[0]}"}, timeout=60)
    assert answer.status_code < 500
    if answer.status_code >= 400:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
