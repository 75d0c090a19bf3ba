"""Many servers that chose their blocks themselves: one client finds them all, and its sessions use them.

`make test` does it with a few; `make scale` with 60.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from lilliput import AutoDistributedModelForCausalLM
from lilliput.client.async_session import AsyncInferenceSession
from lilliput.client.decoder import Decoder
from lilliput.swarm.loop import LoopThread
from lilliput.swarm.node import Node
from lilliput.swarm.peer_calls import serve_peers
from lilliput.swarm.records import ServerRecord
from lilliput.swarm.sockets import remove_stale_sockets

SERVERS = int(os.environ.get("LILLIPUT_SCALE_SERVERS", "12"))
#: in one process, at most
TOGETHER = 15
#: servers that start at the same time: they wait for each other's words more than they compute
AT_ONCE = 12
PROMPT = list(range(5, 25))
NEW = 6
#: each server has room for four sessions, so those that begin later go where there is more room
MAX_LENGTH, PLACES = 256, 4


class Many:
    """A process with several servers."""

    def __init__(self, model: Path, count: int, at_once: int, peers: list[str]) -> None:
        script = str(Path(__file__).with_name("many_servers.py"))
        command = [sys.executable, script, str(model), str(count), str(at_once)]
        command += [str(max(3.0, SERVERS / 4)), str(max(9.0, SERVERS / 3))]  # what all do often costs much
        command += peers
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        facts: dict[str, Any] = json.loads(self.process.stdout.readline())
        return facts

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()


class Bootstraps:
    """Peers that hold no blocks, through which others join."""

    def __init__(self, count: int) -> None:
        self.thread = LoopThread("bootstraps")
        self.nodes: list[Node] = []
        self.addresses: list[str] = []
        for _ in range(count):
            self.nodes.append(self.thread.run(Node.start(self.addresses)))
            self.thread.run(serve_peers(self.nodes[-1]))
            self.addresses += self.thread.run(self.nodes[-1].addresses())

    def end(self, count: int) -> None:
        """So many of them."""
        for _ in range(count):
            self.thread.run(self.nodes.pop(0).stop())
        if not self.nodes:
            self.thread.stop()


@contextlib.contextmanager
def many(model: Path, count: int, peers: list[str]) -> Iterator[tuple[list[Many], dict[str, list[str]]]]:
    """So many servers in processes; yields these, and the servers' addresses by their peer ids."""
    processes = max(2, -(-count // TOGETHER))
    groups = [Many(model, (count + number) // processes, AT_ONCE // processes, peers) for number in range(processes)]
    try:
        servers: dict[str, list[str]] = {}
        for group in groups:
            servers.update(group.answer())
        yield groups, servers
    finally:
        for group in groups:
            group.end()
        for group in groups:
            try:
                group.process.wait(60)
            except subprocess.TimeoutExpired:
                group.process.kill()
        remove_stale_sockets()


@pytest.mark.timeout(150 + 10 * SERVERS)
def test_all_are_found_and_used(tiny_llama: Path, whole: Any) -> None:
    ids = torch.tensor([PROMPT])
    expected = whole.generate(ids, max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=None)
    begun = time.monotonic()
    bootstraps = Bootstraps(2)
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: bootstraps.end(len(bootstraps.nodes)))
        groups, servers = stack.enter_context(many(tiny_llama, SERVERS, bootstraps.addresses))
        started = time.monotonic() - begun
        assert len(servers) == SERVERS
        print(f"\n{SERVERS} servers in {len(groups)} processes served after {started:.0f} s")
        bootstraps.end(1)  # a swarm outlives any of those through whom others have joined
        model = AutoDistributedModelForCausalLM.from_pretrained(
            str(tiny_llama), initial_peers=bootstraps.addresses, dtype="float32"
        )
        remote, decoder = model._remote_model, Decoder(model)
        sessions: list[AsyncInferenceSession] = []

        async def session() -> None:
            sessions.append(opened := AsyncInferenceSession(remote, max_length=MAX_LENGTH))
            tokens = [token async for token in decoder.stream(PROMPT, max_new_tokens=NEW, session=opened)]
            assert tokens == expected[0, len(PROMPT) :].tolist()

        def look() -> list[ServerRecord]:
            records: list[ServerRecord] = model._shared.run(remote.connection.records(remote.name, fresh=True))
            return records

        async def end() -> None:
            await asyncio.gather(*(opened.close() for opened in sessions))
            sessions.clear()

        try:
            asked = time.perf_counter()
            records = look()
            found = time.perf_counter() - asked
            assert {record.peer_id for record in records} == set(servers)
            print(f"all found in {found:.3f} s")
            # they came at the same time, so some choose again
            until = time.monotonic() + 120
            while min(held := holders(look())) < SERVERS // 4:  # a third of them on average
                assert time.monotonic() < until, held
                time.sleep(1)
            settled = time.monotonic() - begun
            print(f"servers of each block after {settled:.0f} s: {held}")
            counts = dict.fromkeys(servers, 0)
            while min(counts.values()) == 0:
                assert len(sessions) < PLACES * min(held), counts  # all that there is room for
                decoder.run(session())
                for hop, stats in zip(sessions[-1].hops, sessions[-1].stats, strict=True):
                    counts[hop.peer_id] += stats.computed_tokens  # as the server says
                # what servers announce shows who is used
                spans = {hop.peer_id: (hop.record.start, hop.record.end) for hop in sessions[-1].hops}
                until = time.monotonic() + 60
                while any(not r.sessions and spans.get(r.peer_id) == (r.start, r.end) for r in look()):
                    assert time.monotonic() < until, (spans, look())
                    time.sleep(0.2)
            took = time.monotonic() - begun
            fewest, most = min(counts.values()), max(counts.values())
            print(f"all used after {took:.0f} s and {len(sessions)} sessions, for {fewest} to {most} tokens each")
            print(memory(groups))
            decoder.run(end())
        finally:
            decoder.close()
            model.close()


def holders(records: list[ServerRecord]) -> list[int]:
    """Of each block."""
    serving = [record for record in records if record.state == "serving"]
    return [sum(record.start <= block < record.end for record in serving) for block in range(6)]


def memory(groups: list[Many]) -> str:
    processes = [psutil.Process(group.process.pid) for group in groups]
    daemons = [child for process in processes for child in process.children(recursive=True)]
    ours, theirs = ([p.memory_full_info().pss / 2**20 for p in some] for some in (processes, daemons))
    files = [p.num_fds() for p in daemons]
    return (
        f"MiB, shared ones shared out: {sum(ours) / SERVERS:.0f} a server, {sum(theirs) / SERVERS:.0f} its daemon, "
        f"{sum(ours) + sum(theirs):.0f} in all; open files of a daemon: {min(files)} to {max(files)}, "
        f"of a process of servers: up to {max(p.num_fds() for p in processes)}"
    )
