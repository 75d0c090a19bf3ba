"""Chains of made-up servers some of which lie, and die: nobody who is honest is ever accused, and if everything is
audited, outputs are right."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection
from typing import Any

import pytest
import torch
from test_chain import BLOCKS, HIDDEN, SPANS, Held, MadeUp, World, computed

from lilliput.client import audits
from lilliput.client.async_session import AsyncInferenceSession
from lilliput.client.connection import Patience
from lilliput.client.remote import RemoteModel
from lilliput.client.route import Hop, find_chain
from lilliput.swarm.records import ServerRecord
from lilliput.wire import lilliput_pb2 as pb


class Liar(MadeUp):
    """Now and then, what it returns is slightly wrong."""

    def compute(self, held: Held, step: pb.Step, hidden: torch.Tensor) -> None:
        honest = held.compute

        def lie(step: pb.Step, hidden: torch.Tensor) -> torch.Tensor:
            output = honest(step, hidden)
            return output + 0.3 * torch.randn(output.shape) if self.chance.random() < 0.3 else output

        held.compute = lie  # type: ignore[method-assign]
        super().compute(held, step, hidden)
        held.compute = honest  # type: ignore[method-assign]


class WorldWithLiars(World):
    """For each run of blocks two honest servers and a liar, and some for more blocks."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.convicted: set[str] = set()
        for span in (*SPANS, (0, 3), (3, 6)):
            self.add(*span)
            liar = Liar(self, *span)
            self.servers[liar.peer_id] = liar

    @property
    def liars(self) -> set[str]:
        return {peer for peer, server in self.servers.items() if isinstance(server, Liar)}

    def convict(self, peer_id: str) -> None:
        self.convicted.add(peer_id)

    async def records(self, model: str) -> list[ServerRecord]:
        await asyncio.sleep(0)
        living = [server for server in self.servers.values() if not server.dead]
        self.chance.shuffle(living)
        return [
            ServerRecord(peer_id=s.peer_id, model="m", model_blocks=BLOCKS, start=s.start, end=s.end, dtype="float32")
            for s in living
        ]

    async def chain(self, model: str, start: int, end: int, *, banned: Collection[str], **_: Any) -> list[Hop]:
        return find_chain(await self.records(model), start, end, banned={*banned, *self.convicted})

    async def deaths(self, times: int, seconds: float) -> None:
        for _ in range(times):
            await asyncio.sleep(self.chance.random() * seconds)
            server = self.chance.choice([server for server in self.servers.values() if not server.dead])
            self.add(server.start, server.end)
            server.die()


async def talk(seed: int, share: float) -> None:
    chance, world = random.Random(seed), WorldWithLiars(seed)
    connection: Any = world
    remote = RemoteModel(connection, "m", BLOCKS, push=False, audit=share, patience=Patience(attempts=1000))
    session = AsyncInferenceSession(remote, max_length=4096, rows=3)
    generator = torch.Generator().manual_seed(seed)
    held = torch.zeros(2, 0, HIDDEN)
    for _ in range(12):
        if held.shape[1] and chance.random() < 0.3:
            session.position = chance.randint(max(0, held.shape[1] - 8), held.shape[1])
            held = held[:, : session.position]
        if held.shape[1] and chance.random() < 0.3:
            parents = [chance.randrange(len(held)) for _ in range(chance.randint(1, 3))]
            session.reorder(parents)
            held = held[parents]
        step = torch.randn(len(held), chance.choice([1, 1, 3, 20]), HIDDEN, generator=generator)
        held = torch.cat([held, step], dim=1)
        deaths = asyncio.create_task(world.deaths(chance.choice([0, 1, 2]), chance.choice([0.002, 0.01, 0.05])))
        async with asyncio.timeout(60):
            output = await session.step(step)
        deaths.cancel()
        assert world.convicted <= world.liars
        if share == 1:
            assert torch.allclose(output, computed(held, 0, BLOCKS)[:, -step.shape[1] :], atol=1e-4)
    assert session.audits.agreed
    assert set(session.audits.convicted) == world.convicted
    await session.close()
    assert not any(server.stream.unanswered_bytes for server in world.servers.values())


@pytest.mark.parametrize("share", [1.0, 0.3])
@pytest.mark.parametrize("seed", range(3))
def test_only_liars_are_accused(seed: int, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audits, "_chance", random.Random(seed))
    asyncio.run(talk(seed, share))
