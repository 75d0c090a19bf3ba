"""Commands in a private swarm of two bootstraps and a server, as processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lilliput.cli.nursery import Nursery
from lilliput.errors import MissingBlocks
from lilliput.swarm.swarm_key import SwarmKey

SECONDS = 120


class Bootstrap:
    def __init__(self, key: Path, *options: str) -> None:
        command = [sys.executable, "-m", "lilliput.cli", "bootstrap", "--host", "127.0.0.1", "--port", "0", "--json"]
        self.process = subprocess.Popen(
            [*command, "--swarm-key", str(key), *options], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL
        )
        assert self.process.stdout is not None
        facts: dict[str, Any] = json.loads(self.process.stdout.readline())
        (self.address,) = facts["addresses"]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def lilliput(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lilliput.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, stdin=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "swarm.key"
    SwarmKey.generate().write(file)
    return file


@pytest.fixture(scope="module")
def bootstraps(key: Path) -> Iterator[tuple[Bootstrap, Bootstrap]]:
    first = Bootstrap(key)
    second = Bootstrap(key, "--initial-peers", first.address)
    yield first, second
    for bootstrap in (first, second):
        bootstrap.kill()


def test_a_swarm_outlives_its_first_peer_and_strangers_stay_outside(
    bootstraps: tuple[Bootstrap, Bootstrap], key: Path, tiny_llama: Path, nursery: Nursery, tmp_path: Path
) -> None:
    first, second = bootstraps
    options = ["--swarm-key", str(key), "--initial-peers", first.address, "--dtype", "float32"]
    process = nursery.spawn(["serve", str(tiny_llama), "--blocks", "0:6", "--host", "127.0.0.1", "--json", *options])
    try:
        facts = json.loads(process.stdout.readline())
        members = ["--swarm-key", str(key)]
        seen = lilliput("doctor", "--json", "--host", "127.0.0.1", *members, "--initial-peers", first.address)
        findings = [json.loads(line) for line in seen.stdout.splitlines()]
        assert seen.returncode == 0, seen.stdout + seen.stderr
        assert any(f["what"].startswith("dialled by") and f["state"] == "ok" for f in findings), findings

        first.process.kill()
        first.process.wait()
        both = ["--initial-peers", first.address, "--initial-peers", second.address]
        status = lilliput("status", "--json", *members, *both)
        assert status.returncode == 0, status.stderr
        servers = [s for m in json.loads(status.stdout)["models"] for s in m["servers"]]
        assert [s["peer_id"] for s in servers] == [facts["peer_id"]]

        for wrong in ([], ["--swarm-key", str(tmp_path / "wrong")]):
            if wrong:
                SwarmKey.generate().write(wrong[1])
            refused = lilliput("status", *wrong, "--initial-peers", second.address)
            assert refused.returncode == 1
            assert "--swarm-key" in refused.stderr
        seen = lilliput("doctor", "--json", *members, "--initial-peers", first.address)
        assert seen.returncode == 1
        assert "refuses connections" in seen.stdout

        from lilliput import AutoDistributedModelForCausalLM

        for trusted in (facts["peer_id"], facts["addresses"][0]):
            model = AutoDistributedModelForCausalLM.from_pretrained(
                str(tiny_llama), initial_peers=[second.address], swarm_key=key, trusted_peers=trusted
            )
            assert model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, min_new_tokens=4).shape == (1, 7)
            model.close()
        with pytest.raises(MissingBlocks, match="trusted"):
            AutoDistributedModelForCausalLM.from_pretrained(
                str(tiny_llama),
                initial_peers=[second.address],
                swarm_key=key,
                trusted_peers=second.address,
            )
    finally:
        process.kill()
