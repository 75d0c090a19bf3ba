"""`lilliput status`: who holds what."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

from terminal import Family, Terminal, invoke, start

from lilliput.cli.local_swarm import LocalSwarm


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
        "tok/s",
        "free/cache",
        "sessions",
        "queue",
        "ms",
        "ver",
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


def test_watching_on_a_terminal_ends_with_ctrl_c(swarm: LocalSwarm, peers: list[str]) -> None:
    family = Family()
    with Terminal("status", "--watch", *peers, family=family, columns=80) as terminal:
        for _ in range(2):
            terminal.see("Ctrl-C leaves")
            terminal.see("all are served")
            terminal.see(swarm.servers[2].peer_id[-8:])
        terminal.ctrl("c")
        assert terminal.end() == 130
    assert "Traceback" not in terminal.screen
    family.assert_gone()


def test_watching_without_a_terminal_goes_on_line_by_line(peers: list[str]) -> None:
    family = Family()
    with start("status", "--watch", "--json", *peers, family=family) as watching:
        assert watching.stdout is not None
        for _ in range(2):
            (held,) = json.loads(watching.stdout.readline())["models"]
            assert (held["missing"], held["coverage"]) == ([], [1] * 30)
            assert all(0 < server["round_trip_ms"] < 5000 for server in held["servers"])
        watching.send_signal(signal.SIGINT)
        assert watching.wait(20) == 130
        assert watching.stderr is not None
        assert watching.stderr.read() == ""
    family.assert_gone()


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
