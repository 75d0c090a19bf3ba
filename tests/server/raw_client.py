"""A client that speaks the raw protocol, so that it can also misbehave, and the plain model to compare with."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import LlamaModel

from lilliput import Server
from lilliput.errors import LilliputError
from lilliput.server.service import Service
from lilliput.swarm.loop import LoopThread
from lilliput.swarm.node import Node
from lilliput.wire import lilliput_pb2 as pb
from lilliput.wire.channel import Channel, Received, error_of
from lilliput.wire.protocol import FORWARD_INCREMENTAL

T = TypeVar("T")

HIDDEN, BLOCKS = 64, 6
#: long enough for the busiest machine: no test waits so long unless something is wrong
PATIENCE = 60.0
TOLERANCE = 1e-4


def wait_until(condition: Callable[[], object], seconds: float = PATIENCE) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest error, relative to the largest number."""
    assert got.shape == expected.shape
    return float((got.float() - expected).abs().max() / expected.abs().max())


class Whole:
    """The model's blocks in one process, without a cache: what every answer is compared with."""

    def __init__(self, folder: Path) -> None:
        self.model = LlamaModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        self.model.norm = torch.nn.Identity()
        self.layers = self.model.layers

    def __call__(
        self,
        hidden: torch.Tensor,
        start: int = 0,
        end: int = BLOCKS,
        *,
        mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        prompts: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[rows, tokens, hidden] through blocks `[start, end)`. `mask`: bool [rows or 1, tokens, tokens]."""
        bias = None
        if mask is None and position_ids is not None:  # or transformers would take jumps for the seams of packed rows
            mask = torch.ones(1, hidden.shape[1], hidden.shape[1], dtype=torch.bool).tril()
        if mask is not None:
            lowest = torch.finfo(torch.float32).min
            bias = torch.zeros(mask.shape).masked_fill(~mask, lowest)[:, None].expand(hidden.shape[0], -1, -1, -1)
        self.model.layers = self.layers[start:end]
        hooks = [
            layer.register_forward_pre_hook(
                lambda module, args, kwargs, i=i: ((args[0] + prompts[i], *args[1:]), kwargs),  # type: ignore[index]
                with_kwargs=True,
            )
            for i, layer in enumerate(self.model.layers if prompts is not None else ())
        ]
        try:
            with torch.set_grad_enabled(hidden.requires_grad):
                return self.model(
                    inputs_embeds=hidden, attention_mask=bias, position_ids=position_ids, use_cache=False
                ).last_hidden_state
        finally:
            for hook in hooks:
                hook.remove()


class Stream:
    """One raw stream, for code that is not asynchronous."""

    def __init__(self, thread: LoopThread, channel: Channel) -> None:
        self.thread, self.channel = thread, channel

    def send(self, message: pb.Message, tensors: dict[str, torch.Tensor] | None = None, codec: str = "none") -> None:
        self.thread.run(self.channel.send(message, tensors, codec=codec), PATIENCE)

    def send_bytes(self, data: bytes) -> None:
        async def write() -> None:
            with contextlib.suppress(OSError, RuntimeError):  # the server may hang up in the middle
                for offset in range(0, len(data), 1 << 16):
                    self.channel._writer.write(data[offset : offset + (1 << 16)])
                    await self.channel._writer.drain()

        self.thread.run(write(), PATIENCE)

    def receive(self) -> Received | None:
        """The next message; None at the end of the stream."""
        return self.thread.run(self.channel.receive(), PATIENCE)

    def expect(self, kind: str) -> Any:
        """The body of the next message, which must be of this kind. An error is raised."""
        return self.thread.run(self.channel.expect(kind), PATIENCE).body

    def error(self) -> LilliputError:
        """The next message, which must be an error; `.body` of the result is the message itself."""
        received = self.receive()
        assert received is not None, "the stream ended without a word"
        assert received.kind == "error", f"{received.kind} instead of an error: {received.body}"
        error = error_of(received.body)  # type: ignore[arg-type]
        error.body = received.body  # type: ignore[attr-defined]
        return error

    def ended(self) -> bool:
        """Wait for the server to end the stream."""
        return self.receive() is None

    def ping(self, number: int = 7) -> None:
        self.send(pb.Message(ping=pb.Ping(id=number)))
        assert self.expect("pong").id == number

    def close(self) -> None:
        """End the stream without a word."""
        self.thread.loop.call_soon_threadsafe(self.channel.close)


class Session(Stream):
    """An accepted session and everything that its cache must hold.

    :ivar inputs: [rows, length, hidden], as the server should remember them
    """

    def __init__(self, thread: LoopThread, channel: Channel, whole: Whole, start: int, end: int) -> None:
        super().__init__(thread, channel)
        self.whole, self.start, self.end = whole, start, end
        self.inputs = torch.zeros(0, 0, HIDDEN)
        self.promised = 0
        self.info = pb.Info()
        self.ids = itertools.count(1)

    @property
    def length(self) -> int:
        return self.inputs.shape[1]

    def submit(
        self,
        hidden: torch.Tensor | None,
        *,
        step_id: int | None = None,
        start_position: int | None = None,
        parents: Sequence[int] = (),
        max_length: int = 0,
        hashes: bytes = b"",
        codec: str = "none",
        **tensors: torch.Tensor,
    ) -> int:
        """Send a step, whatever it is worth. Returns its id."""
        body = pb.Step(step_id=next(self.ids) if step_id is None else step_id, parents=parents, hashes=hashes)
        body.max_length = max_length
        if start_position is not None:
            body.start_position = start_position
        named = {} if hidden is None else {"hidden": hidden}
        self.send(pb.Message(step=body), {**named, **tensors}, codec)
        return body.step_id

    def output(self) -> tuple[Any, torch.Tensor]:
        """The next message, which must be an output: its body and the hidden states."""
        received = self.thread.run(self.channel.expect("output"), PATIENCE)
        return received.body, received.tensors["hidden"]

    def step(self, hidden: torch.Tensor, **fields: Any) -> tuple[Any, torch.Tensor]:
        """Send a step and await its output."""
        step_id = self.submit(hidden, **fields)
        body, output = self.output()
        assert body.step_id == step_id
        return body, output

    def refused(self, hidden: torch.Tensor | None, **fields: Any) -> LilliputError:
        """Send a step that must be refused; the session must go on. Returns why."""
        step_id = self.submit(hidden, **fields)
        error: Any = self.error()
        assert error.body.step_id == step_id
        assert not error.body.closed
        return error

    def go_on(
        self,
        tokens: int = 1,
        *,
        rows: int | None = None,
        start_position: int | None = None,
        parents: Sequence[int] = (),
        **fields: Any,
    ) -> Any:
        """Some random tokens, whose outputs must be those of the plain model. Returns the output's body."""
        rows = rows or len(parents) or max(1, self.inputs.shape[0])
        hidden = torch.randn(rows, tokens, HIDDEN)
        body, output = self.step(hidden, start_position=start_position, parents=parents, **fields)
        self.remember(hidden, start_position=start_position, parents=parents)
        assert body.length == self.length
        expected = self.whole(self.inputs, self.start, self.end)[:, -tokens:]
        assert difference(output, expected) < TOLERANCE
        return body

    def remember(self, hidden: torch.Tensor, *, start_position: int | None = None, parents: Sequence[int] = ()) -> None:
        kept = self.inputs[list(parents)] if parents else self.inputs
        kept = kept if start_position is None else kept[:, :start_position]
        if not kept.shape[1]:
            kept = torch.zeros(hidden.shape[0], 0, HIDDEN)
        self.inputs = torch.cat([kept, hidden.float()], dim=1)

    def bye(self) -> None:
        """Close in order."""
        self.send(pb.Message(close=pb.Close()))
        assert self.ended()
        self.close()


class Peer:
    """A client's node, on a loop in a thread."""

    def __init__(self, server: Server, whole: Whole, initial_peers: Sequence[str] | None = None) -> None:
        self.server, self.whole = server, whole
        self.thread = LoopThread("raw-client")
        peers = server.addresses if initial_peers is None else initial_peers
        self.node = self.thread.run(Node.start(peers, client_mode=True), PATIENCE)

    def stream(self, handler: str = FORWARD_INCREMENTAL, server: Server | None = None) -> Stream:
        return Stream(self.thread, self._channel(handler, server))

    def ask(self, start: int = 0, end: int = BLOCKS, *, server: Server | None = None, **fields: Any) -> Session:
        """Send an open message; its answer is for the caller to read."""
        session = Session(self.thread, self._channel(FORWARD_INCREMENTAL, server), self.whole, start, end)
        fields = {"max_length": 256, "rows": 1, **fields}
        session.promised = fields["rows"] * -(-fields["max_length"] // 32)
        session.send(pb.Message(open=pb.Open(start=start, end=end, **fields)))
        return session

    def session(self, start: int = 0, end: int = BLOCKS, *, server: Server | None = None, **fields: Any) -> Session:
        """A session, accepted at once."""
        session = self.ask(start, end, server=server, **fields)
        session.info = session.expect("info")
        assert session.info.accepted
        return session

    def stop(self) -> None:
        self.thread.run(self.node.stop(), PATIENCE)
        self.thread.stop()

    def _channel(self, handler: str, server: Server | None) -> Channel:
        server = server or self.server
        assert server.dht is not None
        return self.thread.run(self.node.open(server.dht.peer_id, handler, within=PATIENCE), PATIENCE)


class Bystander:
    """A session that generates all the while, and at the end compares all that it got with the plain model."""

    _LENGTH = 200

    def __init__(self, peer: Peer) -> None:
        self.session = peer.session(max_length=self._LENGTH, rows=2)
        self.steps = 0
        self._runs: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[]]
        self._running = True
        self.generator = torch.Generator().manual_seed(1)
        self._task = peer.thread.submit(self._generate())

    async def _generate(self) -> None:
        position = 0
        while self._running:
            tokens = 17 if position == 0 else 1
            hidden = torch.randn(2, tokens, HIDDEN, generator=self.generator)
            body = pb.Step(step_id=next(self.session.ids), start_position=position)
            await self.session.channel.send(pb.Message(step=body), {"hidden": hidden})
            async with asyncio.timeout(PATIENCE):
                received = await self.session.channel.expect("output")
            self._runs[-1].append((hidden, received.tensors["hidden"]))
            position += tokens
            self.steps += 1
            if position == self._LENGTH:
                position = 0
                self._runs.append([])
            await asyncio.sleep(0.002)

    def at_least(self, more: int) -> None:
        """Wait until it has made so many more steps."""
        target = self.steps + more
        wait_until(lambda: self.steps >= target or self._task.done())
        assert not self._task.done() or self._task.result() is None

    def stop(self) -> None:
        self._running = False
        self._task.result(PATIENCE)
        for run in filter(None, self._runs):
            inputs, outputs = (torch.cat(parts, dim=1) for parts in zip(*run, strict=True))
            assert difference(outputs, self.session.whole(inputs)) < TOLERANCE
        self.session.bye()


def service_of(server: Server) -> Service:
    assert server.service is not None
    return server.service


def on_loop(server: Server, function: Callable[[], Awaitable[T]]) -> T:
    """Run a coroutine on the server's own loop."""

    async def call() -> T:
        return await function()

    assert server._loop is not None
    return asyncio.run_coroutine_threadsafe(call(), server._loop).result(PATIENCE)


def assert_nothing_left(server: Server, besides: Sequence[Session] = ()) -> None:
    """Wait until no session is left besides some; then no page, promise, stream or task of one may be."""
    service = service_of(server)
    engine, admission, others = service.engine, service.admission, len(besides)
    promised = sum(session.promised for session in besides)

    async def tasks() -> int:
        return len({str(task.get_coro()) for task in asyncio.all_tasks() if "ClientStream.run" in str(task.get_coro())})

    wait_until(lambda: len(service.streams) == others)
    wait_until(lambda: (admission.running, admission.waiting, admission.promised) == (others, 0, promised))
    wait_until(lambda: engine.call(lambda: len(engine._sessions)).result(PATIENCE) == others)
    wait_until(lambda: engine.call(lambda: engine.pool.used).result(PATIENCE) <= promised)
    engine.call(engine.pool.check).result(PATIENCE)
    wait_until(lambda: on_loop(server, tasks) <= others)


@contextlib.contextmanager
def serving(model: Path, blocks: tuple[int, int] = (0, BLOCKS), **options: Any) -> Iterator[Server]:
    """A server in this process, exact enough to compare with."""
    server = Server(str(model), blocks, **{"dtype": "float32", "cache_tokens": 8192, **options})
    with server:
        yield server
