"""Servers die, leave and join at random for a while, and nobody who talks through them notices.

`make test` runs a short one; a long one is `make test ARGS=tests/client/test_soak.py` with LILLIPUT_SOAK_SECONDS=600,
LILLIPUT_SOAK_SERVERS=12 and LILLIPUT_SOAK_CLIENTS=8 in the environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from lilliput import AutoDistributedModelForCausalLM, Server
from lilliput.cli.local_swarm import LocalServer, LocalSwarm
from lilliput.cli.nursery import Nursery
from lilliput.client.async_session import AsyncInferenceSession
from lilliput.client.connection import Patience
from lilliput.client.decoder import Decoder
from lilliput.client.recovery import Recovery
from lilliput.swarm.sockets import remove_stale_sockets

SECONDS = float(os.environ.get("LILLIPUT_SOAK_SECONDS", "15"))
SERVERS = int(os.environ.get("LILLIPUT_SOAK_SERVERS", "6"))
CLIENTS = int(os.environ.get("LILLIPUT_SOAK_CLIENTS", "4"))
#: between two events (seconds)
PAUSE = float(os.environ.get("LILLIPUT_SOAK_PAUSE", "2"))
SPANS = [(0, 2), (2, 4), (4, 6), (0, 3), (3, 6), (1, 5)]
NEW = 20


class Fate(threading.Thread):
    """Kills, dismisses and starts servers, but never leaves a block without one that is known to live."""

    def __init__(self, swarm: LocalSwarm) -> None:
        super().__init__(name="fate")
        self.swarm, self.random, self.done = swarm, random.Random(5), threading.Event()
        self.dismissed: set[int] = set()
        #: all servers' processes that there ever were, and their daemons
        self.processes: set[psutil.Process] = set()
        #: files of theirs
        self.sockets: set[str] = set()
        self.kills = self.starts = 0
        self.error: BaseException | None = None

    @property
    def living(self) -> list[LocalServer]:
        return [s for s in self.swarm.servers if s.process.poll() is None and s.pid not in self.dismissed]

    def look(self) -> None:
        for server in self.living:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(server.pid)
                family = [process, *process.children(recursive=True)]
                self.processes.update(family)
                connections = [one for member in family for one in member.net_connections("unix")]
                self.sockets.update(one.laddr for one in connections if one.laddr.startswith("/"))

    def run(self) -> None:
        try:
            self.look()
            while not self.done.wait(PAUSE * self.random.uniform(0.5, 1.5)):
                if len(self.living) < SERVERS:
                    self.swarm.start([self.random.choice(SPANS)])
                    self.starts += 1
                self.look()
                victim = self.random.choice(self.living)
                others = [server for server in self.living if server is not victim]
                if not all(any(s.blocks[0] <= b < s.blocks[1] for s in others) for b in range(6)):
                    continue
                if self.random.random() < 0.7:
                    os.kill(victim.pid, signal.SIGKILL)
                    self.kills += 1
                else:
                    os.kill(victim.pid, signal.SIGTERM)
                    self.dismissed.add(victim.pid)
        except BaseException as e:
            self.error = e


@pytest.mark.timeout(SECONDS + 240)
def test_nobody_notices(tiny_llama: Path, whole: Any, nursery: Nursery) -> None:
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(5, 250, (int(length),), generator=generator).tolist() for length in (3, 17, 40, 150, 600)]
    expected = [
        whole.generate(torch.tensor([p]), max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=None)[0]
        for p in prompts
    ]
    answers, before = 0, set(threading.enumerate())
    recoveries: list[Recovery] = []

    async def client(decoder: Decoder, model: Any, number: int, until: float) -> None:
        nonlocal answers
        turn = number
        while time.monotonic() < until:
            prompt = prompts[turn % len(prompts)]
            session = AsyncInferenceSession(model._remote_model, max_length=len(prompt) + NEW)
            try:
                tokens = [t async for t in decoder.stream(prompt, max_new_tokens=NEW, session=session)]
                recoveries.extend(session.recoveries)
            finally:
                await session.close()
            assert tokens == expected[turn % len(prompts)][len(prompt) :].tolist()
            answers += 1
            turn += 1

    async def clients(decoder: Decoder, model: Any) -> None:
        until = time.monotonic() + SECONDS
        await asyncio.gather(*(client(decoder, model, number, until) for number in range(CLIENTS)))

    with (
        LocalSwarm(
            str(tiny_llama),
            (SPANS * SERVERS)[:SERVERS],
            options=["--dtype", "float32", "--cache-tokens", "32768"],
            nursery=nursery,
        ) as swarm,
        # it lives from the beginning to the end, and can be looked into
        Server(str(tiny_llama), (2, 4), initial_peers=swarm.initial_peers, dtype="float32", cache_tokens=32768) as here,
    ):
        model = AutoDistributedModelForCausalLM.from_pretrained(
            str(tiny_llama), initial_peers=swarm.initial_peers, dtype="float32", patience=Patience(silence=4.0)
        )
        decoder, fate = Decoder(model), Fate(swarm)
        fate.start()
        try:
            decoder.run(clients(decoder, model))
        finally:
            fate.done.set()
            fate.join()
            decoder.close()
        if fate.error is not None:
            raise fate.error
        print(f"{answers} answers, {fate.kills} kills, {len(fate.dismissed)} dismissals, {fate.starts} starts")
        moved = sum(recovery.moved for recovery in recoveries)
        longest = max((recovery.seconds for recovery in recoveries), default=0.0)
        print(f"{len(recoveries) - moved} recoveries, {moved} moves; the longest took {longest:.2f} s")
        assert answers >= CLIENTS
        assert fate.kills + len(fate.dismissed)
        _assert_pages_are_free(model)
        model._shared.run(_assert_no_task_is_left())
        daemon = psutil.Process(model._shared.run(model._shared.connection.node()).p2p._child.pid)
        model.close()
        assert not [t for t in set(threading.enumerate()) - before if t.name == "lilliput-client"]
        _assert_nothing_is_held(here)
        fate.look()
    _, left = psutil.wait_procs([*fate.processes, daemon], timeout=10)
    assert not left
    remove_stale_sockets()
    assert not [path for path in fate.sockets if Path(path).exists()]


def _assert_pages_are_free(model: Any) -> None:
    """As the servers that live say themselves, in records that are younger than the last session."""
    remote = model._remote_model
    until = time.monotonic() + 20
    while True:
        time.sleep(1)
        records = model._shared.run(remote.connection.records(remote.name, fresh=True))
        busy = [r for r in records if r.cache_tokens_free != r.cache_tokens or r.sessions]
        if not busy or time.monotonic() > until:
            break
    assert not busy


async def _assert_no_task_is_left() -> None:
    """Of sessions: what the connection and its node do in the background goes on."""
    await asyncio.sleep(0.5)  # what was cancelled has its turns
    names = [getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks()]
    assert not [name for name in names if name.split(".")[0] in ("Chain", "Moves", "Replay", "Repair", "Run")]
    assert not [name for name in names if "Session" in name]


def _assert_nothing_is_held(server: Server) -> None:
    service: Any = server.service
    until = time.monotonic() + 20
    while True:
        used = service.engine.call(lambda: service.engine.pool.used).result(10)
        held = used, service.pushed_sessions, service.streams, service.admission.running, service.admission.waiting
        if not any(held) or time.monotonic() > until:
            break
        time.sleep(0.1)
    assert not any(held), held
