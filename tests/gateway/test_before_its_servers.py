"""An API that is started before anybody is there: it says so, and answers when all have come."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from lilliput.cli.local_swarm import LocalSwarm
from lilliput.cli.nursery import Nursery
from lilliput.models.sources import ModelFiles
from lilliput.swarm.identity import Identity

MODEL = "SmolLM2-135M-Instruct"


def wait_until(condition: Callable[[], object], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


def test_it_waits_for_the_swarm_and_for_its_blocks(demo_model: ModelFiles, nursery: Nursery, tmp_path: Path) -> None:
    identity = tmp_path / "identity"
    known = Identity.generate()
    known.write(identity)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    address = f"/ip4/127.0.0.1/tcp/{port}/p2p/{known.peer_id}"
    command = [sys.executable, "-m", "lilliput.cli", "api", "smollm2", "--initial-peers", address, "--port", "0"]
    with (tmp_path / "log").open("wb") as log:
        api = subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, stderr=log)
    said = (tmp_path / "log").read_text
    try:
        assert api.stdout is not None
        url = json.loads(api.stdout.readline())["url"]
        assert "none of the initial peers answers" in said()
        assert httpx.get(f"{url}/health").status_code == 200
        assert httpx.get(f"{url}/ready", timeout=60).json()["error"]["code"] == "swarm_unreachable"

        options = ["--port", port, "--identity", str(identity)]
        with LocalSwarm("smollm2", [(0, 15)], options=options, nursery=nursery) as swarm:
            wait_until(lambda: "no server holds blocks 15:30" in said())
            assert httpx.get(f"{url}/ready").json()["error"]["code"] == "missing_blocks"
            swarm.add((15, 30), ["--port", "0", "--identity", str(tmp_path / "other")])
            wait_until(lambda: httpx.get(f"{url}/ready").status_code == 200)
            question = {"model": MODEL, "prompt": "Hi", "max_tokens": 1}
            assert httpx.post(f"{url}/v1/completions", json=question, timeout=60).status_code == 200
            wait_until(lambda: f"every block of {MODEL} has a server now" in said())
    finally:
        api.send_signal(signal.SIGINT)
        assert api.wait(20) == 130
    assert "Traceback" not in said()
