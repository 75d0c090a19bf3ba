"""`lilliput serve`: errors in one line, and a quick end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from terminal import Family, Terminal, invoke, start

from lilliput.cli.local_swarm import LocalSwarm
from lilliput.cli.nursery import Nursery
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


@pytest.mark.parametrize("size", ["fast", "8", "0GB"])
def test_a_size_that_is_none(size: str) -> None:
    shown = invoke("serve", "smollm2", "--peer-rate", size)
    assert shown.exit_code == 2
    assert f"'{size}' is not a size such as 8GB" in shown.stderr


def test_a_dtype_that_is_none(demo_model: ModelFiles) -> None:
    shown = invoke("serve", "smollm2", "--blocks", "0:1", "--dtype", "float8")
    assert (shown.exit_code, shown.stdout) == (1, "")
    assert "unknown dtype 'float8'" in shown.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("device", "error"),
    [
        ("tpu3", "'tpu3' is no device such as cpu, cuda or cuda:1"),
        ("meta", "there is no device meta here"),
        ("cuda:99", "there is no device cuda:99 here"),
    ],
)
def test_a_device_that_is_not_there(demo_model: ModelFiles, device: str, error: str) -> None:
    shown = invoke("serve", "smollm2", "--blocks", "0:1", "--device", device, "--host", "127.0.0.1")
    assert (shown.exit_code, shown.stdout) == (1, "")
    assert error in shown.stderr.splitlines()[-1]


def test_a_cache_larger_than_the_machine(demo_model: ModelFiles) -> None:
    shown = invoke("serve", "smollm2", "--blocks", "0:1", "--cache-tokens", "999999999999", "--host", "127.0.0.1")
    assert (shown.exit_code, shown.stdout) == (1, "")
    assert "a cache for 999,999,999,999 tokens of these blocks takes 715," in shown.stderr.splitlines()[-1]


def test_too_little_memory_for_the_blocks(tiny_llama: Path) -> None:
    script = (
        "import resource\n"
        "import lilliput.server.server\n"  # takes more than the blocks
        "from lilliput.cli import run\n"
        "used = next(int(line.split()[1]) << 10 for line in open('/proc/self/status') if line.startswith('VmData'))\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (used + (512 << 20), resource.RLIM_INFINITY))\n"
        "run()\n"
    )
    options = ["serve", str(tiny_llama), "--blocks", "0:6", "--host", "127.0.0.1", "--cache-tokens", "1048576"]
    ended = subprocess.run([sys.executable, "-c", script, *options], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "there is not enough memory for blocks 0:6 of tiny-llama and a cache" in ended.stderr


def said(nursery: Nursery, *arguments: str) -> str:
    """What a server says that does not start."""
    process = nursery.spawn(["serve", "smollm2", "--blocks", "0:1", "--host", "127.0.0.1", *arguments])
    with process.stdin, process.stdout, process.stderr:
        process.wait(60)
        assert process.stdout.read() == b""
        return process.stderr.read().decode()


def test_a_port_in_use(part: LocalSwarm, nursery: Nursery) -> None:
    port = part.initial_peers[0].split("/")[4]
    assert f"port {port} is in use by another program\n" in said(nursery, "--port", port)


def test_nobody_to_join(demo_model: ModelFiles, nursery: Nursery) -> None:
    nobody = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWJMpHSTaqq6g2As7rzbyqD5o2h6RuiPh8or9CU5KqYavd"
    assert "\nnone of the initial peers answers (" in said(nursery, "--initial-peers", nobody)


@pytest.fixture
def family() -> Family:
    return Family()


class Supervised:
    """A server, and its supervisor's ends of the pipes."""

    def __init__(self, family: Family) -> None:
        arguments = ("serve", "smollm2", "--blocks", "0:10", "--host", "127.0.0.1", "--supervised")
        self.process = start(*arguments, family=family)
        self.told: list[str] = []
        assert self.process.stdin is not None
        self.process.stdin.write("[]\n")
        self.process.stdin.flush()

    def hear(self, stage: str) -> None:
        """Wait until it tells a stage, or its addresses."""
        assert self.process.stdout is not None
        while not self.told or self.told[-1] != stage:
            facts = json.loads(self.process.stdout.readline())
            self.told.append(facts.get("stage", "addresses"))


@pytest.mark.parametrize("stage", ["loading libraries", "reading blocks 0:10", "measuring"])
def test_ctrl_c_while_it_starts(demo_model: ModelFiles, family: Family, stage: str) -> None:
    server = Supervised(family)
    server.hear(stage)
    family.sockets()
    time.sleep(0.1)
    server.process.send_signal(signal.SIGINT)
    server.process.send_signal(signal.SIGINT)  # some people press it twice
    assert server.process.wait(20) == 130
    assert "Traceback" not in server.process.communicate()[1]
    family.assert_gone()


def test_it_leaves_when_its_supervisor_does(demo_model: ModelFiles, family: Family) -> None:
    server = Supervised(family)
    server.hear("addresses")
    assert server.told == [
        "loading libraries",
        "finding the swarm",
        "finding the model",
        "reading blocks 0:10",
        "measuring",
        "addresses",
    ]
    assert family.sockets()
    _, errors = server.process.communicate(timeout=20)  # closes its standard input
    assert (server.process.returncode, errors) == (143, "")
    family.assert_gone()


def test_ctrl_c_while_it_serves(part: LocalSwarm, family: Family) -> None:
    peers = ("--initial-peers", part.initial_peers[0])
    with Terminal("serve", "smollm2", "--blocks", "20:22", "--host", "127.0.0.1", *peers, family=family) as terminal:
        terminal.see("Serving blocks 20:22 of SmolLM2-135M-Instruct in bfloat16, with cache for [0-9,]+ tokens")
        (address,) = terminal.see(r"--initial-peers (\S+)").groups()
        assert "20:22" in invoke("status", "--initial-peers", address).stdout
        assert family.sockets()
        for _ in range(4):  # some people go on pressing it
            terminal.ctrl("c")
        assert terminal.end() == 130
        assert "Traceback" not in terminal.screen
    family.assert_gone()
    assert "20:22" not in invoke("status", *peers).stdout  # it has said goodbye


_PROGRAM = """
import os, signal
from lilliput import Server

signal.signal(signal.SIGTERM, signal.default_int_handler)
server, impatience = Server("smollm2", (0, 1), cache_tokens=1024), [signal.SIGINT, signal.SIGTERM]
wait = server._ended.wait

def wait_and_be_interrupted(timeout):
    if impatience:
        os.kill(os.getpid(), impatience.pop())
    return wait(timeout)

server._ended.wait = wait_and_be_interrupted
try:
    with server:
        print("serves", flush=True)
        signal.pause()
except KeyboardInterrupt:
    print("interrupted", server.is_alive())
"""


def test_a_program_that_is_told_twice_to_end_ends_its_server(demo_model: ModelFiles, family: Family) -> None:
    pipe = subprocess.PIPE
    program = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM], stdout=pipe, stderr=pipe, text=True, env=family.environment
    )
    assert program.stdout is not None
    assert program.stdout.readline() == "serves\n"
    assert family.sockets()
    program.send_signal(signal.SIGTERM)
    said, complaints = program.communicate(timeout=30)
    assert (program.returncode, said) == (0, "interrupted False\n")
    assert "Traceback" not in complaints
    family.assert_gone()


def test_drain_stops_a_server_and_nothing_else(demo_model: ModelFiles, family: Family) -> None:
    process = start("serve", "smollm2", "--blocks", "0:1", "--host", "127.0.0.1", "--json", family=family)
    assert process.stdout is not None
    facts = json.loads(process.stdout.readline())
    draining = start("drain", str(facts["pid"]), family=family)
    said, complaints = draining.communicate(timeout=30)
    assert (draining.returncode, complaints) == (0, "")
    assert said.endswith("It has left.\n")
    assert process.wait(10) == 128 + signal.SIGTERM
    assert "is no Lilliput server" in invoke("drain", str(os.getpid())).stderr
    assert "there is no process" in invoke("drain", str(facts["pid"])).stderr
