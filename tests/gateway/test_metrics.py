"""What Prometheus reads from the API and from its servers, and the dashboard that shows it."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import openai
import pytest
from gateways import Gateway
from prometheus_client.parser import text_string_to_metric_families

from lilliput.cli.local_swarm import LocalSwarm

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"
MODEL = "SmolLM2-135M-Instruct"


def scrape(url: str) -> dict[str, float]:
    """Values by name, those with several labels summed up."""
    answer = httpx.get(url)
    assert answer.status_code == 200
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            assert sample.labels.get("model") == MODEL or sample.name.endswith("_created")
            labels = "".join(f"/{v}" for k, v in sample.labels.items() if k not in ("model", "blocks"))
            for name in {sample.name, sample.name + labels}:
                values[name] = values.get(name, 0) + sample.value
    return values


def more(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {name: after[name] - before.get(name, 0) for name in after}


def test_an_answer_is_counted(gateway: Gateway, client: openai.OpenAI, swarm: LocalSwarm) -> None:
    urls = [f"{gateway.url}/metrics", *(server.metrics for server in swarm.servers)]
    before = [scrape(url) for url in urls]
    client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=8, logit_bias={"2": -100})
    assert httpx.get(f"{gateway.url}/nowhere").status_code == 404
    api, *servers = (more(old, scrape(url)) for old, url in zip(before, urls, strict=True))
    assert api["lilliput_api_tokens_total/answer"] == 8
    assert api["lilliput_api_tokens_total/prompt"] == 4
    assert api["lilliput_api_steps_total"] == 8
    assert api["lilliput_api_requests_total//v1/completions/200"] == 1
    assert api["lilliput_api_requests_total/other/404"] == 1
    for part in ("network", "queue", "compute"):
        assert api[f"lilliput_api_step_seconds_count/{part}"] == 8
    assert api["lilliput_api_step_seconds_sum/compute"] > 0
    assert api["lilliput_api_failures_total"] == 0
    for server in servers:
        assert server["lilliput_server_steps_total"] == 8
        assert server["lilliput_server_tokens_total"] == 4 + 7
        assert server["lilliput_server_batch_rows_count"] == server["lilliput_server_rounds_total"] == 8
        assert server["lilliput_server_step_computing_seconds_sum"] > 0


def test_what_is_there(gateway: Gateway, swarm: LocalSwarm) -> None:
    api = scrape(f"{gateway.url}/metrics")
    assert (api["lilliput_api_swarm_servers"], api["lilliput_api_swarm_missing_blocks"]) == (2, 0)
    values = scrape(swarm.servers[0].metrics)
    pages = sum(values[f"lilliput_server_cache_pages/{state}"] for state in ("used", "kept", "free"))
    assert values["lilliput_server_cache_groups"] == 1
    assert pages * values["lilliput_server_cache_page_tokens"] == 12288


def test_the_dashboard_shows_what_there_is(guarded: Gateway, swarm: LocalSwarm) -> None:
    named = set(re.findall(r"lilliput_(?:api|server)_[a-z_]+", DASHBOARD.read_text()))
    httpx.get(f"{guarded.url}/nowhere")  # requests are counted from the first one on
    there = scrape(f"{guarded.url}/metrics").keys() | scrape(swarm.servers[0].metrics).keys()
    assert len(named) > 20
    assert {"lilliput_api_key_requests_total", "lilliput_api_key_tokens_total"} <= named
    assert named - there == set()


@pytest.mark.parametrize(
    ("command", "option", "error"),
    [("serve", "--metrics-port", "cannot serve metrics"), ("api", "--port", "cannot listen")],
)
def test_a_port_that_is_taken_is_found_out_before_the_model_is_looked_for(
    command: str, option: str, error: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        arguments = [command, "./nowhere", "--host", "127.0.0.1", option, port]
        shown = subprocess.run(
            [sys.executable, "-m", "lilliput.cli", *arguments], capture_output=True, text=True, timeout=120
        )
    assert shown.returncode == 1
    assert shown.stderr.startswith(f"{error} on 127.0.0.1, port {port}: Address already in use")
    assert shown.stderr.count("\n") == 1
