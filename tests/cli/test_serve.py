"""`lilliput serve`: errors in one line, and a quick end."""

from __future__ import annotations

import json
import signal
import subprocess
import time

import pytest
from terminal import Family, invoke, run, start

from lilliput.cli.local_swarm import LocalSwarm
from lilliput.models.sources import ModelFiles


@pytest.mark.parametrize("span", ["5:99", "30:31"])
def test_blocks_that_the_model_lacks(demo_model: ModelFiles, span: str) -> None:
    shown = invoke("serve", "smollm2", "--blocks", span, "--host", "127.0.0.1")
    assert (shown.exit_code, shown.stdout) == (1, "")
    assert shown.stderr.splitlines()[-1] == f"SmolLM2-135M-Instruct has blocks 0:30; {span} is no part of them"


@pytest.mark.parametrize("span", ["5", "5:", "5:5", "7:5", "a:b", "-1:5"])
def test_a_span_that_is_none(span: str) -> None:
    shown = invoke("serve", "smollm2", "--blocks", span)
    assert shown.exit_code == 2
    assert "is not a span of blocks such as 0:10" in shown.stderr


def test_a_port_in_use(part: LocalSwarm) -> None:
    port = part.initial_peers[0].split("/")[4]
    shown = run("serve", "smollm2", "--blocks", "0:1", "--host", "127.0.0.1", "--port", port)
    assert (shown.returncode, shown.stdout) == (1, "")
    assert shown.stderr.splitlines()[-1].endswith(f"port {port} is in use by another program")


def test_a_dtype_that_is_none(demo_model: ModelFiles) -> None:
    shown = invoke("serve", "smollm2", "--blocks", "0:1", "--dtype", "float8")
    assert (shown.exit_code, shown.stdout) == (1, "")
    assert "unknown dtype 'float8'" in shown.stderr.splitlines()[-1]


def test_nobody_to_join(demo_model: ModelFiles) -> None:
    nobody = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWJMpHSTaqq6g2As7rzbyqD5o2h6RuiPh8or9CU5KqYavd"
    shown = invoke("serve", "smollm2", "--blocks", "0:1", "--host", "127.0.0.1", "--initial-peers", nobody)
    assert (shown.exit_code, shown.stdout) == (1, "")
    assert shown.stderr.splitlines()[-1].startswith("none of the initial peers answers")


@pytest.fixture
def family() -> Family:
    return Family()


def serving(family: Family) -> subprocess.Popen[str]:
    return start("serve", "smollm2", "--blocks", "0:2", "--host", "127.0.0.1", "--json", family=family)


@pytest.mark.parametrize("delay", [0.5, 1.5, 4.0])
def test_ctrl_c_while_it_starts(demo_model: ModelFiles, family: Family, delay: float) -> None:
    process = serving(family)
    time.sleep(delay)
    family.sockets()
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "Traceback" not in output + errors
    family.assert_gone()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_it_serves(demo_model: ModelFiles, family: Family, number: int, code: int) -> None:
    process = serving(family)
    assert process.stdout is not None
    facts = json.loads(process.stdout.readline())
    assert facts["blocks"] == [0, 2]
    assert family.sockets()
    process.send_signal(number)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == code
    assert "Traceback" not in errors
    family.assert_gone()


def test_it_leaves_when_its_supervisor_does(demo_model: ModelFiles, family: Family) -> None:
    arguments = ("serve", "smollm2", "--blocks", "0:2", "--host", "127.0.0.1", "--supervised")
    process = start(*arguments, family=family)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("[]\n")
    process.stdin.flush()
    told = []
    while "addresses" not in (line := json.loads(process.stdout.readline())):
        told.append(line["stage"])
    assert told == ["loading libraries", "finding the swarm", "finding the model", "reading blocks 0:2", "measuring"]
    family.sockets()
    process.stdin.close()
    assert process.wait(20) == 143
    assert process.stderr is not None
    assert process.stderr.read() == ""
    process.stdout.close()
    process.stderr.close()
    family.assert_gone()
