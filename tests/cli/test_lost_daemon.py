"""What becomes of a peer whose p2p daemon is killed."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest
from terminal import Family, start


def daemons(family: Family) -> list[psutil.Process]:
    return [process for process in family.processes() if "p2pd" in process.name()]


@pytest.mark.parametrize(
    "command",
    [["serve", "--blocks", "0:6", "--cache-tokens", "256"], ["bootstrap"]],
    ids=["server", "bootstrap"],
)
def test_it_ends_and_says_why(command: list[str], tiny_llama: Path) -> None:
    family = Family()
    name, *options = command
    model = [str(tiny_llama)] if name == "serve" else []
    process = start(name, *model, *options, "--host", "127.0.0.1", "--port", "0", "--json", family=family)
    with process.stdin, process.stdout, process.stderr:  # type: ignore[union-attr]
        json.loads(process.stdout.readline())  # type: ignore[union-attr]
        (daemon,) = daemons(family)
        daemon.kill()
        assert process.wait(30) == 1
        error = process.stderr.read()  # type: ignore[union-attr]
    assert "this peer's p2p daemon has ended, so nothing comes or goes" in error
    assert "Traceback" not in error
    family.assert_gone()
