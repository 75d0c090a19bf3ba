"""What is wrong or not to be had gets the API's own errors, quickly, and never a 500."""

from __future__ import annotations

import socket
import time
from typing import Any

import httpx
import pytest
from gateways import Gateway

MODEL = "SmolLM2-135M-Instruct"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
TEXT = {"model": MODEL, "prompt": "Hi"}


def body_of(answer: httpx.Response) -> Any:
    """The error; every one has the same shape."""
    assert list(answer.json()) == ["error"]
    error = answer.json()["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert error["message"]
    return error


@pytest.mark.parametrize(
    ("path", "change", "status", "param", "code"),
    [
        ("chat/completions", {"model": "gpt-4"}, 404, "model", "model_not_found"),
        ("chat/completions", {"messages": []}, 400, "messages", "invalid_value"),
        ("chat/completions", {"messages": [{"role": "king", "content": "x"}]}, 400, "messages.0.role", "invalid_value"),
        ("chat/completions", {"messages": [{"role": "user"}]}, 400, "messages.0", "invalid_value"),
        ("chat/completions", {"temperature": "1"}, 400, "temperature", "invalid_value"),
        ("chat/completions", {"temperature": 2.5}, 400, "temperature", "invalid_value"),
        ("chat/completions", {"n": 1.5}, 400, "n", "invalid_value"),
        ("chat/completions", {"stream": 1}, 400, "stream", "invalid_value"),
        ("chat/completions", {"audio": {}}, 400, "audio", "unsupported_parameter"),
        ("chat/completions", {"top_logprobs": 3}, 400, None, "invalid_value"),
        ("chat/completions", {"max_tokens": 9000}, 400, None, "context_length_exceeded"),
        ("chat/completions", {"logit_bias": {"99999": 1}}, 400, "logit_bias", "invalid_value"),
        ("chat/completions", {"response_format": {"type": "xml"}}, 400, "response_format", "invalid_value"),
        (
            "chat/completions",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no"}}}},
            400,
            "response_format",
            "invalid_value",
        ),
        ("completions", {"prompt": "la " * 9000}, 400, None, "context_length_exceeded"),
        ("completions", {"prompt": [1] * 9000}, 400, None, "context_length_exceeded"),
        ("completions", {"prompt": "x" * 4_000_000}, 400, None, "context_length_exceeded"),
        ("completions", {"prompt": [70000]}, 400, "prompt", "invalid_value"),
        ("completions", {"prompt": ["x"] * 60, "n": 2}, 400, "n", "invalid_value"),
        ("completions", {"best_of": 3}, 400, "best_of", "invalid_value"),
        ("completions", {"suffix": "x"}, 400, "suffix", "unsupported_parameter"),
        ("completions", {"stop": ["", 1]}, 400, "stop.0", "invalid_value"),
        ("completions", {"prompt": ["x", 1]}, 400, "prompt.1", "invalid_value"),
        ("completions", {"stream_options": {"include_usage": True}}, 400, None, "invalid_value"),
    ],
)
def test_refusals(gateway: Gateway, path: str, change: Any, status: int, param: str | None, code: str | None) -> None:
    began = time.monotonic()
    answer = httpx.post(f"{gateway.url}/v1/{path}", json=(CHAT if "chat" in path else TEXT) | change, timeout=20)
    error = body_of(answer)
    assert (answer.status_code, error["param"] if param else None, error["code"]) == (status, param, code)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("content", "kind", "status", "code"),
    [
        (b"", "application/json", 400, "invalid_json"),
        (b"[]", "application/json", 400, "invalid_json"),
        (b'{"model": "x", ', "application/json", 400, "invalid_json"),
        (b"[" * 100_000, "application/json", 400, "invalid_json"),
        (b'{"model": 1' + b"0" * 5000 + b"}", "application/json", 400, "invalid_json"),
        (b'{"model": "\\ud800", "prompt": "x"}', "application/json", 400, "invalid_value"),
        (
            b'{"model": "%s", "prompt": "x", "temperature": NaN}' % MODEL.encode(),
            "application/json",
            400,
            "invalid_value",
        ),
        (b'{"model": "\xff", "prompt": "x"}', "application/json", 400, "invalid_json"),
        (b"model=x", "application/x-www-form-urlencoded", 415, "unsupported_media_type"),
        (b" " * (9 << 20), "application/json", 413, "request_too_large"),
    ],
)
def test_bodies_that_are_no_request(gateway: Gateway, content: bytes, kind: str, status: int, code: str) -> None:
    answer = httpx.post(f"{gateway.url}/v1/completions", content=content, headers={"Content-Type": kind})
    assert (answer.status_code, body_of(answer)["code"]) == (status, code)


def test_what_openai_has_and_this_has_not(gateway: Gateway) -> None:
    for path in ("embeddings", "responses", "assistants", "images/generations"):
        answer = httpx.post(f"{gateway.url}/v1/{path}", json={"model": MODEL, "input": "x"})
        error = body_of(answer)
        assert (answer.status_code, error["code"]) == (404, "unknown_url")
        assert error["message"] == f"There is no POST /v1/{path} here."
    answer = httpx.get(f"{gateway.url}/v1/completions")
    assert (answer.status_code, answer.headers["allow"], body_of(answer)["code"]) == (
        405,
        "POST",
        "method_not_supported",
    )


def test_a_long_name_is_not_told_back(gateway: Gateway) -> None:
    answer = httpx.post(f"{gateway.url}/v1/completions", json=TEXT | {"model": "x" * 100_000})
    assert (answer.status_code, body_of(answer)["code"]) == (404, "model_not_found")
    assert len(answer.content) < 500


def test_the_headers_of_an_answer_alone(gateway: Gateway) -> None:
    for path in ("/", "/swarm", "/health", "/ready", "/v1/models"):
        answer = httpx.head(f"{gateway.url}{path}")
        assert (answer.status_code, answer.content) == (200, b"")
        assert int(answer.headers["content-length"]) > 0
    assert httpx.head(f"{gateway.url}/v1/completions").status_code == 405


def test_pages_of_strangers_may_not_ask(gateway: Gateway) -> None:
    asks = {"Origin": "https://chat.example", "Access-Control-Request-Method": "POST"}
    asked = httpx.options(f"{gateway.url}/v1/completions", headers=asks)
    asking = httpx.get(f"{gateway.url}/v1/models", headers=asks)
    assert asked.status_code == 405
    assert not [name for answer in (asked, asking) for name in answer.headers if name.startswith("access-control")]


def test_a_body_without_a_length_is_not_endless(gateway: Gateway) -> None:
    def endless() -> Any:
        for _ in range(1000):
            yield b" " * 65536

    try:
        answer = httpx.post(
            f"{gateway.url}/v1/completions", content=endless(), headers={"Content-Type": "application/json"}
        )
        assert answer.status_code == 413
    except httpx.TransportError:
        pass  # it hung up while we were still sending, which is right, too


def test_other_paths(gateway: Gateway) -> None:
    assert body_of(httpx.get(f"{gateway.url}/v1/embeddings"))["code"] == "unknown_url"
    assert body_of(httpx.get(f"{gateway.url}/v1/completions"))["code"] == "method_not_supported"
    assert body_of(httpx.get(f"{gateway.url}/v1/models/other"))["code"] == "model_not_found"
    assert httpx.get(f"{gateway.url}/v1/models/{MODEL}").json()["id"] == MODEL
    page = httpx.get(f"{gateway.url}/")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "http://" not in page.text.replace("http://www.w3.org", "")
    assert "src=" not in page.text


def test_lines_that_are_no_http(gateway: Gateway) -> None:
    host, port = gateway.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(b"\x16\x03\x01 what\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 400")
