"""A chain of servers that are made up: they are slow, they fail, die and lose what they push, at random.

Whatever happens, a session's outputs are those of servers that do not.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from lilliput.client.async_session import AsyncInferenceSession
from lilliput.client.connection import Patience
from lilliput.client.remote import RemoteModel
from lilliput.client.route import Hop, find_chain
from lilliput.errors import BadRequest, LilliputError, ServerFailure, Unreachable
from lilliput.swarm.records import ServerRecord
from lilliput.wire import lilliput_pb2 as pb
from lilliput.wire.channel import Received, error_message

HIDDEN, BLOCKS = 3, 6
SPANS = [(0, 2), (2, 4), (4, 6)]
PART = 6


def computed(held: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """Blocks `[start, end)` over all tokens that rows hold: each output depends on all tokens before it."""
    for block in range(start, end):
        held = torch.sin(held + 0.4 * held.cumsum(dim=1) + block)
    return held


class Line:
    """Carries calls one after another, each a little later."""

    def __init__(self, chance: random.Random) -> None:
        self._queue: asyncio.Queue[Callable[[], None]] = asyncio.Queue()
        self._chance = chance
        self.task = asyncio.get_running_loop().create_task(self._run())

    def call(self, function: Callable[[], None]) -> None:
        self._queue.put_nowait(function)

    async def _run(self) -> None:
        while True:
            function = await self._queue.get()
            if self._chance.random() < 0.5:
                await asyncio.sleep(self._chance.random() * 0.002)
            function()


@dataclass
class Held:
    """A session on a made-up server."""

    stream: Stream
    number: int
    start: int
    end: int
    tokens: list[torch.Tensor] = field(default_factory=lambda: [torch.zeros(0, 0, HIDDEN)] * 64)
    highest: int = 0
    reordered: int = 0

    def compute(self, step: pb.Step, hidden: torch.Tensor) -> torch.Tensor:
        """As a server's engine does: block by block over what is held, [rows, tokens, hidden]."""
        held = self.tokens[0]
        parents = list(step.parents) if step.parents and step.reordering > self.reordered else None
        if parents is not None and max(parents) >= len(held):
            raise BadRequest(f"parents {parents} in a session with {len(held)} rows")
        rows = held[parents] if parents is not None else held
        if step.start_position > held.shape[1]:
            raise BadRequest(f"start_position {step.start_position} is beyond the {held.shape[1]} tokens")
        if step.start_position and len(rows) != len(hidden):
            raise BadRequest(f"{len(hidden)} rows sent, but the session has {len(rows)}")
        if parents is not None:
            self.reordered = step.reordering
        kept = rows[:, : step.start_position] if step.start_position else hidden[:, :0]
        self.tokens[0] = torch.cat([kept, hidden], dim=1)
        return computed(self.tokens[0], self.start, self.end)[:, -hidden.shape[1] :]


class Stream:
    """What `PeerStream` is, to a made-up server."""

    usable = True
    heard = excused_seconds = 0.0
    unanswered_bytes = 0

    def __init__(self, server: MadeUp) -> None:
        self.server, self.sessions, self.held = server, {}, {}  # type: ignore[var-annotated]
        self._numbers = itertools.count(1)
        self.there, self.back = Line(server.chance), Line(server.chance)

    def attach(self, session: Any) -> int:
        if self.server.dead:
            raise Unreachable("dead")
        number = next(self._numbers)
        self.sessions[number] = session
        return number

    def detach(self, number: int) -> None:
        self.sessions.pop(number, None)

    async def drain(self) -> None:
        await asyncio.sleep(0)

    def post(
        self, number: int, message: pb.Message, tensors: Mapping[str, torch.Tensor] | None = None, codec: str = ""
    ) -> None:
        kind = message.WhichOneof("body")
        message.tensors.extend(pb.Tensor(nbytes=tensor.nbytes) for tensor in (tensors or {}).values())
        self.there.call(lambda: self.server.take(self, number, getattr(message, str(kind)), dict(tensors or {})))

    def answer(self, number: int, message: pb.Message, tensors: Mapping[str, torch.Tensor] | None = None) -> None:
        kind = str(message.WhichOneof("body"))

        def deliver() -> None:
            if number in self.sessions and not self.server.dead:
                self.sessions[number].take(Received(kind, getattr(message, kind), tensors or {}))

        self.back.call(deliver)


class MadeUp:
    """A server of `[start, end)`."""

    def __init__(self, world: World, start: int, end: int) -> None:
        self.world, self.chance, self.start, self.end = world, world.chance, start, end
        self.peer_id = f"peer{next(world.numbers)}-{start}"
        self.dead = self.failing = False
        self.stream = Stream(self)
        self.work = Line(self.chance)
        self.keys: dict[bytes, Held] = {}
        self.lines: dict[str, Line] = {}

    def take(self, stream: Stream, number: int, body: Any, tensors: dict[str, torch.Tensor]) -> None:
        if self.dead:
            return
        if isinstance(body, pb.Open):
            stream.held[number] = self.keys[body.push_key] = Held(stream, number, body.start, body.end)
            stream.answer(number, pb.Message(info=pb.Info(accepted=True, max_length=4096, max_step_tokens=PART)))
        elif isinstance(body, pb.Step) and number in stream.held:
            self.step(stream.held[number], body, tensors["hidden"])
        elif isinstance(body, pb.Close):
            held = stream.held.pop(number, None)
            self.keys = {key: other for key, other in self.keys.items() if other is not held}

    def step(self, held: Held, step: pb.Step, hidden: torch.Tensor) -> None:
        if step.step_id < held.highest:
            error = ServerFailure("a later step has come")
            held.stream.answer(held.number, error_message(error, step_id=step.step_id))
            return
        held.highest = max(held.highest, step.step_id)
        self.work.call(lambda: self.compute(held, step, hidden))

    def compute(self, held: Held, step: pb.Step, hidden: torch.Tensor) -> None:
        if self.dead:
            return
        try:
            if self.failing:
                self.failing = False
                raise ServerFailure("it failed")
            output = held.compute(step, hidden)
        except LilliputError as e:
            held.stream.answer(held.number, error_message(e, step_id=step.step_id))
            return

        def answer(unpushed: bool) -> None:
            body = pb.Output(step_id=step.step_id, unpushed=unpushed)
            held.stream.answer(held.number, pb.Message(output=body), {"hidden": output})

        if not step.route:
            answer(False)
            return
        following = step.route[0]
        onward = pb.Step()
        onward.CopyFrom(step)
        del onward.route[0]

        def arrive() -> None:
            peer = self.world.servers[following.peer]
            if self.dead:
                return
            if peer.dead or (self.peer_id, following.peer) in self.world.cut:
                answer(True)
                return
            if (session := peer.keys.get(following.push_key)) is not None:
                peer.step(session, onward, output)
            if self.chance.random() < 0.02:  # it has arrived, but the word of it was lost
                answer(True)

        self.lines.setdefault(following.peer, Line(self.chance)).call(arrive)

    def die(self) -> None:
        self.dead = True
        for session in list(self.stream.sessions.values()):
            self.stream.back.call(lambda session=session: session.lost(Unreachable("it died")))


class World:
    """The servers, what becomes of them, and a connection to them."""

    closed = False

    def __init__(self, seed: int) -> None:
        self.chance, self.numbers = random.Random(seed), itertools.count()
        self.servers: dict[str, MadeUp] = {}
        self.cut: set[tuple[str, str]] = set()
        self.unlinked: dict[tuple[str, str], float] = {}
        for span in SPANS:
            self.add(*span)

    def add(self, start: int, end: int) -> None:
        server = MadeUp(self, start, end)
        self.servers[server.peer_id] = server

    async def chain(self, model: str, start: int, end: int, *, banned: Collection[str], **_: Any) -> list[Hop]:
        await asyncio.sleep(0)
        records = [
            ServerRecord(peer_id=s.peer_id, model="m", model_blocks=BLOCKS, start=s.start, end=s.end)
            for s in self.servers.values()
            if not s.dead
        ]
        return find_chain(records, start, end)

    async def session_stream(self, peer_id: str, *, within: float) -> tuple[Any, bool]:
        return self.servers[peer_id].stream, True

    def ban(self, peer_id: str) -> None:
        pass

    def unlink(self, *pair: str) -> None:
        self.unlinked[pair[0], pair[1]] = time.monotonic() + 0.02

    def linked(self, *pair: str) -> bool:
        return self.unlinked.get((pair[0], pair[1]), 0.0) < time.monotonic()

    async def trouble(self, times: int, seconds: float) -> None:
        for _ in range(times):
            await asyncio.sleep(self.chance.random() * seconds)
            living = [server for server in self.servers.values() if not server.dead]
            server = self.chance.choice(living)
            what = self.chance.random()
            if what < 0.35:
                self.add(server.start, server.end)
                server.die()
            elif what < 0.6:
                server.failing = True
            else:
                self.cut = {(server.peer_id, other.peer_id) for other in living}


async def talk(seed: int) -> None:
    chance = random.Random(seed)
    world = World(seed)
    connection: Any = world
    remote = RemoteModel(connection, "m", BLOCKS, push=chance.random() < 0.9, patience=Patience(attempts=1000))
    session = AsyncInferenceSession(remote, max_length=4096, rows=3)
    generator = torch.Generator().manual_seed(seed)
    held = torch.zeros(2, 0, HIDDEN)
    for _ in range(30):
        if held.shape[1] and chance.random() < 0.3:
            position = chance.randint(max(0, held.shape[1] - 8), held.shape[1])
            session.position = position
            held = held[:, :position]
        if held.shape[1] and chance.random() < 0.3:
            parents = [chance.randrange(len(held)) for _ in range(chance.randint(1, 3))]
            session.reorder(parents)
            held = held[parents]
        step = torch.randn(len(held), chance.choice([1, 1, 3, 20]), HIDDEN, generator=generator)
        held = torch.cat([held, step], dim=1)
        trouble = asyncio.create_task(world.trouble(chance.choice([0, 1, 2, 5]), chance.choice([0.002, 0.01, 0.05])))
        async with asyncio.timeout(20):
            output = await session.step(step)
        trouble.cancel()
        expected = computed(held, 0, BLOCKS)[:, -step.shape[1] :]
        assert torch.allclose(output, expected, atol=1e-4)
    await session.close()
    assert not any(server.stream.unanswered_bytes for server in world.servers.values())


@pytest.mark.parametrize("seed", range(8))
def test_outputs_are_right_whatever_happens(seed: int) -> None:
    asyncio.run(talk(seed))
