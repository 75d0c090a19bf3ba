"""`lilliput trace`: the time of an answer, place by place, adds up."""

from __future__ import annotations

import json
import re

import pytest
from terminal import invoke

from lilliput.cli.local_swarm import LocalSwarm


def test_it_shows_where_each_millisecond_went(swarm: LocalSwarm, peers: list[str]) -> None:
    shown = invoke("trace", "smollm2", *peers, "--new-tokens", "4")
    assert shown.exit_code == 0
    title, heading, *lines = shown.stdout.splitlines()
    assert re.fullmatch(r"SmolLM2-135M-Instruct: 4 tokens read, 4 written in \d+\.\d\d s", title)
    assert heading.split() == ["milliseconds", "first", "token", "others", "at", "most", "all"]
    rows = [line for line in lines if re.search(r"\d\.\d", line)]
    *parts, whole = [[float(number) for number in re.findall(r"-?\d+\.\d", row)] for row in rows]
    for column in (0, -1):
        assert sum(part[column] for part in parts) == pytest.approx(whole[column], abs=0.05 * (len(parts) + 1))
    for server, (start, end) in zip(swarm.servers, swarm.spans, strict=True):  # type: ignore[misc]
        at = lines.index(next(line for line in lines if line.startswith(server.peer_id[-8:])))
        assert lines[at].split() == [f"{server.peer_id[-8:]},", "blocks", f"{start}:{end}"]
        assert [line.split()[0] for line in lines[at + 1 : at + 4]] == ["network", "queue", "compute"]
    assert any(line.startswith("way back ~") for line in lines)
    assert "…" not in shown.stdout
    assert re.search(r"as request req_[0-9a-f]{16}\.$", shown.stdout.rstrip())


def test_as_json_with_each_network_measured(peers: list[str]) -> None:
    facts = json.loads(invoke("trace", "smollm2", *peers, "--no-push", "--new-tokens", "4", "--json").stdout)
    assert (facts["prompt_tokens"], facts["tokens"], facts["recoveries"]) == (4, 4, [])
    assert sum(part["total_ms"] for part in facts["parts"]) == pytest.approx(facts["total_ms"], abs=0.1)
    assert sum(part["first_ms"] for part in facts["parts"]) == pytest.approx(facts["first_ms"], abs=0.1)
    networks = [part for part in facts["parts"] if part["part"] == "network"]
    assert [part["blocks"] for part in networks] == [[0, 10], [10, 20], [20, 30]]
    assert not any("estimated" in part for part in facts["parts"])


def test_an_empty_text(peers: list[str]) -> None:
    shown = invoke("trace", "smollm2", *peers, "--prompt", "")
    assert (shown.exit_code, shown.stdout, shown.stderr.splitlines()[-1]) == (
        1,
        "",
        "There is no text: give it with --prompt.",
    )
