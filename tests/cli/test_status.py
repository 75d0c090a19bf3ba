"""`lilliput status`: who holds what."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from terminal import Terminal, invoke

from lilliput.cli.local_swarm import LocalSwarm
from lilliput.cli.status import HeldModel
from lilliput.swarm.records import ServerRecord


def server(start: int, end: int, state: str = "serving") -> ServerRecord:
    return ServerRecord.model_validate(
        {"peer_id": f"{start}", "model": "m", "start": start, "end": end, "state": state}
    )


@pytest.mark.parametrize(
    ("servers", "missing"),
    [
        ([], [(0, 12)]),
        ([server(0, 12)], []),
        ([server(0, 5), server(3, 8)], [(8, 12)]),
        ([server(2, 4), server(6, 7)], [(0, 2), (4, 6), (7, 12)]),
        ([server(0, 6), server(6, 12, "joining")], [(6, 12)]),
        ([server(0, 6), server(0, 12, "draining")], [(6, 12)]),
        ([server(0, 20)], []),
    ],
)
def test_what_is_missing(servers: list[ServerRecord], missing: list[tuple[int, int]]) -> None:
    assert HeldModel("m", 12, servers).missing() == missing


def test_it_lists_every_server(swarm: LocalSwarm, peers: list[str]) -> None:
    shown = invoke("status", *peers)
    assert shown.exit_code == 0
    first, bar, heading, *rows = shown.stdout.splitlines()
    assert first == "SmolLM2-135M-Instruct, 30 blocks: all are served"
    assert bar == "━" * 30
    assert heading.split() == [
        "server",
        "blocks",
        "state",
        "dtype",
        "tokens/s",
        "free/cache",
        "sessions",
        "queue",
        "version",
        "since",
    ]
    for row, member, blocks in zip(rows, swarm.servers, ("0:10", "10:20", "20:30"), strict=True):
        assert row.split()[:4] == [member.peer_id[-8:], blocks, "serving", "fp32"]


def test_missing_blocks_stand_out(part: LocalSwarm) -> None:
    shown = invoke("status", "smollm2", "--initial-peers", part.initial_peers[0])
    assert shown.exit_code == 0
    assert shown.stdout.splitlines()[:2] == [
        "SmolLM2-135M-Instruct, 30 blocks: nobody serves blocks 10:30",
        "━" * 10 + "·" * 20,
    ]


def test_on_a_terminal_it_fits(peers: list[str]) -> None:
    with Terminal("status", *peers, columns=80) as terminal:
        terminal.see("all are served")
        terminal.see("server .* since *\n")  # in one line
        assert terminal.end() == 0
        assert len(terminal.screen.splitlines()) == 6


def test_json_has_all_that_servers_announce(swarm: LocalSwarm, peers: list[str]) -> None:
    shown = invoke("status", "HuggingFaceTB/SmolLM2-135M-Instruct", "--json", *peers)
    (held,) = json.loads(shown.stdout)["models"]
    assert (held["model"], held["blocks"], held["missing"]) == ("SmolLM2-135M-Instruct", 30, [])
    assert [(s["start"], s["end"]) for s in held["servers"]] == [(0, 10), (10, 20), (20, 30)]
    assert [s["peer_id"] for s in held["servers"]] == [s.peer_id for s in swarm.servers]
    assert all(s["cache_tokens"] > 0 and s["tokens_per_second"] > 0 for s in held["servers"])


def test_a_model_that_nobody_announces(peers: list[str]) -> None:
    shown = invoke("status", "org/other", *peers)
    assert (shown.exit_code, shown.stdout) == (1, "")
    assert shown.stderr == "No server of this swarm has announced other; it has SmolLM2-135M-Instruct.\n"


def test_it_asks_for_an_address() -> None:
    shown = invoke("status")
    assert (shown.exit_code, shown.stdout) == (1, "")
    assert shown.stderr.startswith("Name a member of the swarm with --initial-peers")


def test_it_starts_without_transformers(peers: list[str]) -> None:
    code = (
        "import sys\nfrom lilliput.cli.main import app\n"
        f"try: app(['status', *{peers!r}])\n"
        "except SystemExit: print('transformers' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).splitlines()[-1] == "False"
