"""Keys, limits, and clients that hang up."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from gateways import KEYS, LIMITED, ORIGIN, Gateway
from typer.testing import CliRunner

from lilliput.cli.main import app

MODEL = "SmolLM2-135M-Instruct"
#: more than half of what the servers' caches hold
LONG = 7000


@pytest.fixture
def client(guarded: Gateway) -> openai.OpenAI:
    return guarded.client()


def begin(client: openai.OpenAI, max_tokens: int = LONG) -> Any:
    """A stream that has begun and would run for minutes."""
    stream = client.completions.create(
        model=MODEL, prompt="Count: 1, 2, 3,", max_tokens=max_tokens, stream=True, logit_bias={"2": -100}
    )
    next(iter(stream))
    return stream


def brief(client: openai.OpenAI) -> Any:
    return client.with_options(timeout=60).completions.create(model=MODEL, prompt="Hi", max_tokens=1)


def test_keys(guarded: Gateway) -> None:
    for key in KEYS:
        assert guarded.client(key).models.list().data[0].id == MODEL
    for key in ("wrong", KEYS[0] + "x", KEYS[0][:-1]):
        answer = httpx.get(f"{guarded.url}/v1/models", headers={"Authorization": f"Bearer {key}"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    with pytest.raises(openai.AuthenticationError):
        guarded.client("wrong").completions.create(model=MODEL, prompt="Hi")
    assert httpx.get(f"{guarded.url}/health").json() == {"status": "ok"}
    assert httpx.get(f"{guarded.url}/ready").json()["max_length"] == 8192


def test_pages_of_a_named_origin_may_ask(guarded: Gateway) -> None:
    url = f"{guarded.url}/v1/chat/completions"
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,x-stainless-os"}
    asked = httpx.options(url, headers={"Origin": ORIGIN, **asks})  # browsers bring no key with that
    assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (200, ORIGIN)
    assert "x-stainless-os" in asked.headers["access-control-allow-headers"]
    assert httpx.options(url, headers={"Origin": "https://other.example", **asks}).status_code == 400
    refused = httpx.post(url, json={}, headers={"Origin": ORIGIN})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, ORIGIN)  # it can be read
    assert "X-Request-Id" in refused.headers["access-control-expose-headers"]
    stranger = httpx.get(f"{guarded.url}/health", headers={"Origin": "https://other.example"})
    assert "access-control-allow-origin" not in stranger.headers


def test_a_key_past_its_limit_leaves_room_for_others(guarded: Gateway, client: openai.OpenAI) -> None:
    limited = guarded.client(LIMITED["one"][0])
    first = begin(limited)
    with pytest.raises(openai.RateLimitError) as refused:
        brief(limited)
    assert (refused.value.code, refused.value.type) == ("rate_limit_exceeded", "rate_limit_error")
    assert refused.value.response.headers["retry-after"] == "1"
    answers: list[Any] = []
    waiting = threading.Thread(target=lambda: answers.append(brief(client)))
    waiting.start()  # in the one place to wait, which the limited key does not take
    first.close()
    waiting.join(30)
    assert answers[0].usage.completion_tokens == 1
    assert brief(limited).usage.completion_tokens == 1


def test_tokens_of_a_key(guarded: Gateway, client: openai.OpenAI) -> None:
    limited = guarded.client(LIMITED["few"][0])
    with limited.completions.with_streaming_response.create(
        model=MODEL, prompt=[5] * 4, max_tokens=60, logit_bias={"2": -100}, stream=True
    ) as stream:
        assert stream.headers["x-ratelimit-limit-tokens"] == "20"
        assert int(stream.headers["x-ratelimit-remaining-tokens"]) <= 16
        assert stream.headers["x-ratelimit-limit-requests"] == "600"
        stream.read()
    with pytest.raises(openai.RateLimitError, match="its limit is 20 tokens a minute") as refused:
        brief(limited)
    assert int(refused.value.response.headers["retry-after"]) > 100
    answer = client.completions.with_raw_response.create(model=MODEL, prompt="Hi", max_tokens=1)
    assert not [name for name in answer.headers if name.startswith("x-ratelimit")]
    page = httpx.get(f"{guarded.url}/metrics").text
    for line in (
        'tokens_total{key="few",kind="prompt",model="%s"} 4.0',
        'tokens_total{key="few",kind="answer",model="%s"} 60.0',
        'requests_total{key="few",model="%s",outcome="refused"} 1.0',
    ):
        assert f"lilliput_api_key_{line % MODEL}\n" in page

    def statuses() -> list[int]:
        lines = [json.loads(line) for line in guarded.log.read_text().splitlines()]
        return sorted(line["status"] for line in lines if line.get("key") == "few" and "status" in line)

    until = time.monotonic() + 10  # the line of an answer is written when its sessions are closed, too
    while statuses() != [200, 429]:
        assert time.monotonic() < until, statuses()
        time.sleep(0.1)
    shown = page + guarded.log.read_text()
    assert not [key for key in (*KEYS, *(key for key, _ in LIMITED.values())) if key in shown]


def test_a_bad_file_of_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("ann sk-1\nbob sk-2 requests=many\n")
    shown = CliRunner().invoke(app, ["api", "smollm2", "--api-keys", str(file)])
    assert shown.exit_code == 1
    assert shown.output == f"{file}, line 2: requests must be a whole number from 1 on\n"


def test_who_hangs_up_makes_room_at_once(client: openai.OpenAI) -> None:
    for _ in range(3):
        stream = begin(client)
        stream.close()
    began = time.monotonic()
    begin(client).close()  # neither the gateway nor the servers have room for two
    assert time.monotonic() - began < 5


def test_some_wait_and_others_are_refused(client: openai.OpenAI) -> None:
    first = begin(client)
    answers: list[Any] = []
    waiting = threading.Thread(target=lambda: answers.append(brief(client)))
    waiting.start()
    time.sleep(0.5)
    began = time.monotonic()
    with pytest.raises(openai.RateLimitError) as refused:
        brief(client)
    assert time.monotonic() - began < 5
    assert int(refused.value.response.headers["retry-after"]) >= 1
    assert refused.value.code == "rate_limit_exceeded"
    assert not answers
    first.close()
    waiting.join(30)
    assert answers[0].usage.completion_tokens == 1


def test_who_waits_may_hang_up_too(client: openai.OpenAI) -> None:
    first = begin(client)
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.5).completions.create(model=MODEL, prompt="Hi", max_tokens=1)
    waiting = threading.Thread(target=brief, args=(client,))
    waiting.start()
    time.sleep(0.5)
    assert waiting.is_alive()
    first.close()
    waiting.join(30)
    assert not waiting.is_alive()


def test_a_full_swarm_is_no_mystery(guarded: Gateway, gateway: Gateway) -> None:
    first = begin(guarded.client())
    try:
        with pytest.raises(openai.APITimeoutError):  # it waits in the servers' queues
            gateway.client().with_options(timeout=1).completions.create(model=MODEL, prompt="Hi", max_tokens=LONG)
    finally:
        first.close()
