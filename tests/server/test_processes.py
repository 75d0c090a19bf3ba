"""Servers and clients as processes of their own: killed, interrupted, asked to leave."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from raw_client import BLOCKS, PATIENCE, Peer, assert_nothing_left, service_of, wait_until

from lilliput import Server
from lilliput.swarm import directory

CLIENT = """
import asyncio, sys
import torch
import uvloop
from lilliput.swarm.node import Node
from lilliput.wire import lilliput_pb2 as pb
from lilliput.wire.protocol import FORWARD, FORWARD_INCREMENTAL

async def main(addresses, peer_id, how):
    node = await Node.start(addresses.split(","), client_mode=True)
    session = await node.open(peer_id, FORWARD_INCREMENTAL)
    rows = 4
    await session.send(pb.Message(open=pb.Open(start=0, end=6, rows=rows, max_length=512)))
    while not (await session.expect("info")).body.accepted:
        pass
    await session.send(pb.Message(step=pb.Step(step_id=1)), {"hidden": torch.randn(rows, 100, 64)})
    await session.expect("output")
    waiting = await node.open(peer_id, FORWARD_INCREMENTAL)
    await waiting.send(pb.Message(open=pb.Open(start=0, end=6, rows=4, max_length=2048)))
    await waiting.expect("info")
    training = await node.open(peer_id, FORWARD)
    print("ready", flush=True)
    step = 1
    while how == "computing":
        step += 1
        body = pb.Step(step_id=step, start_position=0)
        await session.send(pb.Message(step=body), {"hidden": torch.randn(1, 100, 64)})
        await training.send(pb.Message(forward=pb.Forward(start=0, end=6)), {"hidden": torch.randn(2, 200, 64)})
        await session.expect("output")
        await training.expect("output")
    await asyncio.sleep(1000)

uvloop.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("how", ["silent", "computing"])
def test_a_killed_client_leaves_nothing(server: Server, how: str) -> None:
    """Its pages are free at once: long before anyone would call it silent."""
    service = service_of(server)
    assert server.dht is not None
    arguments = [",".join(server.addresses), str(server.dht.peer_id), how]
    process = subprocess.Popen([sys.executable, "-c", CLIENT, *arguments], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"ready\n"
        assert service.admission.waiting == 1
        assert service.engine.pool.used >= 16
        if how == "computing":
            computed = service.engine.counters.tokens
            wait_until(lambda: service.engine.counters.tokens > computed + 250)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    begun = time.monotonic()
    assert_nothing_left(server)
    wait_until(lambda: service.passes == 0)
    assert time.monotonic() - begun < service.first_step_seconds - 2


# ---- a server's process ----


class ServerProcess:
    """`lilliput serve` in the swarm of another server."""

    def __init__(self, model: Path, server: Server) -> None:
        command = [sys.executable, "-m", "lilliput.cli", "serve", str(model), "--blocks", f"0:{BLOCKS}", "--json"]
        command += ["--host", "127.0.0.1", "--dtype", "float32", "--cache-tokens", "512"]
        self.process = subprocess.Popen(
            [*command, "--initial-peers", server.addresses[0]],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1].decode()
        facts: dict[str, Any] = json.loads(line)
        self.peer_id, self.model = facts["peer_id"], facts["model"]
        self.daemons = psutil.Process(self.process.pid).children(recursive=True)
        assert self.daemons

    @property
    def dht(self) -> ServerProcess:  # what `Peer` reads of a server
        return self

    def gone(self) -> bool:
        return self.process.poll() is not None and not any(map(is_alive, self.daemons))

    def end(self) -> str:
        """Kill what still runs. Returns what was said on standard error."""
        if self.process.poll() is None:
            self.process.kill()
        return self.process.communicate(timeout=PATIENCE)[1].decode()


def is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


@pytest.fixture
def process(tiny_llama: Path, server: Server) -> Iterator[Any]:
    process = ServerProcess(tiny_llama, server)
    yield process
    process.end()


def serving_peers(peer: Peer, model: str) -> set[str]:
    return {record.peer_id for record in peer.thread.run(directory.find(peer.node, model), PATIENCE)}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_server_that_is_asked_to_leave(server: Server, process: Any, peer: Peer, number: int) -> None:
    """Sessions are told, and told again when they have not moved; the record is withdrawn, the daemon is gone, within
    five seconds."""
    assert server.dht is not None
    both = {str(server.dht.peer_id), process.peer_id}
    wait_until(lambda: serving_peers(peer, process.model) == both)
    stepped = peer.session(server=process, max_length=256)
    stepped.go_on(40)
    accepted = peer.session(server=process, max_length=256)
    waiting = peer.ask(server=process, max_length=256)
    assert not waiting.expect("info").accepted
    stepped.submit(torch.randn(1, 1, 64))
    begun = time.monotonic()
    process.process.send_signal(number)
    for session in (stepped, accepted, waiting):
        received: Any = session.receive()
        if session is stepped and received is not None and received.kind == "output":
            received = session.receive()
        assert received is not None
        if session is not waiting:
            assert received.kind == "leaving"
            received = session.receive()
        if session is stepped and received is not None and received.kind == "output":
            received = session.receive()
        assert received is not None
        assert received.kind == "error"
        assert received.body.closed
        assert "leav" in received.body.text
        assert session.ended()
    assert process.process.wait(PATIENCE) in (0, 128 + number, -number)
    wait_until(process.gone)
    assert time.monotonic() - begun < 5 + 5  # the machine may be busy
    assert serving_peers(peer, process.model) == both - {process.peer_id}
    assert "Traceback" not in process.end()
