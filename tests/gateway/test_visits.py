"""A request's id in the response and in all logs, and where its time went."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import openai
import pytest
from gateways import KEYS, Gateway

from lilliput.cli.local_swarm import LocalSwarm

MODEL = "SmolLM2-135M-Instruct"
ASKED: dict[str, Any] = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 6, "logit_bias": {"2": -100}}
PARTS = {"network", "queue", "compute"}


def headers_of(gateway: Gateway, id: str | None, path: str = "/v1/models/none") -> httpx.Headers:
    return httpx.get(f"{gateway.url}{path}", headers={} if id is None else {"X-Request-Id": id}).headers


def trace_of(gateway: Gateway, id: str) -> dict[str, Any]:
    answer = httpx.get(f"{gateway.url}/v1/requests/{id}")
    assert answer.status_code == 200
    facts: dict[str, Any] = answer.json()
    return facts


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/nowhere", "/v1/models/none"])
def test_every_answer_names_its_request(gateway: Gateway, path: str) -> None:
    assert headers_of(gateway, "mine-1", path)["x-request-id"] == "mine-1"
    assert headers_of(gateway, None, path)["x-request-id"].startswith("req_")


@pytest.mark.parametrize("id", ["a b", 'x","level":"error', "[2J", "x" * 129, ""])
def test_what_is_no_id_gets_another(gateway: Gateway, id: str) -> None:
    assert headers_of(gateway, id)["x-request-id"].startswith("req_")


def test_a_whole_answer_says_where_its_time_went(gateway: Gateway, client: openai.OpenAI) -> None:
    raw = client.completions.with_raw_response.create(**ASKED)
    assert raw.parse()._request_id == raw.headers["x-request-id"]  # OpenAI's client knows the header
    timing = dict(part.split(";dur=") for part in raw.headers["server-timing"].split(", "))
    assert {*PARTS, "before", "embedding", "opening", "waiting", "head", "total"} <= timing.keys()
    named = sum(float(value) for name, value in timing.items() if name != "total")
    assert named <= float(timing["total"]) + 1  # each is rounded to a tenth; a rest below 0 is not told here
    facts = trace_of(gateway, raw.headers["x-request-id"])
    assert (facts["path"], facts["status"]) == ("/v1/completions", 200)
    (answer,) = facts["answers"]
    assert (answer["prompt_tokens"], answer["tokens"]) == (4, 6)
    assert sum(part["total_ms"] for part in answer["parts"]) == pytest.approx(answer["seconds"] * 1e3, abs=0.1)
    assert answer["began_ms"] / 1e3 + answer["seconds"] <= facts["seconds"]


def test_a_streamed_answer_is_looked_up_by_its_id(gateway: Gateway, client: openai.OpenAI, swarm: LocalSwarm) -> None:
    stream = client.completions.create(**ASKED, n=2, stream=True, extra_headers={"X-Request-Id": "streamed/1"})
    assert stream.response.headers["x-request-id"] == "streamed/1"
    assert "server-timing" not in stream.response.headers
    for _ in stream:
        pass
    facts = trace_of(gateway, "streamed/1")
    assert len(facts["answers"]) == 2
    for answer in facts["answers"]:
        servers = {tuple(part["blocks"]): part["peer_id"] for part in answer["parts"] if "peer_id" in part}
        assert servers == {server.blocks: server.peer_id for server in swarm.servers}
        assert sum(part["part"] in PARTS for part in answer["parts"]) == 6
        assert all(part["total_ms"] > 0 for part in answer["parts"] if part["part"] in PARTS)
        assert {part["part"] for part in answer["parts"] if part.get("estimated")} == {"network", "back"}


def test_what_nobody_remembers(gateway: Gateway) -> None:
    answer = httpx.get(f"{gateway.url}/v1/requests/never")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "request_not_found")


def test_the_logs_of_the_gateway_and_of_the_servers_name_the_request(
    gateway: Gateway, client: openai.OpenAI, swarm: LocalSwarm, capsys: pytest.CaptureFixture[str]
) -> None:
    client.completions.create(**ASKED, extra_headers={"X-Request-Id": "logged-1"})
    refused = httpx.post(f"{gateway.url}/v1/completions", json={}, headers={"X-Request-Id": "logged-2"})
    assert refused.status_code == 400
    seen = ""
    deadline = time.monotonic() + 30
    while True:
        ours = [line for line in map(json.loads, gateway.log.read_text().splitlines()) if "request_id" in line]
        seen += capsys.readouterr().err
        theirs = [line for line in map(json.loads, seen.splitlines()) if line.get("request_id") == "logged-1"]
        closed = [line for line in theirs if line["message"].count("closed after")]
        if {"logged-1", "logged-2"} <= {line["request_id"] for line in ours} and len(closed) == len(swarm.servers):
            break
        assert time.monotonic() < deadline
        time.sleep(0.05)
    (line,) = (line for line in ours if line["request_id"] == "logged-1")
    assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/completions", 200)
    assert (line["prompt_tokens"], line["tokens"], line["level"]) == (4, 6, "info")
    assert line["seconds"] > 0
    (line,) = (line for line in ours if line["request_id"] == "logged-2")
    assert line["status"] == 400


def test_another_key_sees_nothing_of_it(guarded: Gateway) -> None:
    url, (mine, other) = guarded.url, ({"Authorization": f"Bearer {key}"} for key in KEYS)
    asked = {"model": MODEL, "prompt": "Once", "max_tokens": 1}
    id = httpx.post(f"{url}/v1/completions", json=asked, headers=mine, timeout=60).headers["x-request-id"]
    found = [httpx.get(f"{url}/v1/requests/{id}", headers=headers).status_code for headers in (mine, other, {})]
    assert found == [200, 404, 401]
