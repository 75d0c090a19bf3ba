"""A swarm with a key: servers push to each other and train, and who lacks the key can do none of it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hivemind.compression import serialize_torch_tensor
from hivemind.p2p import P2P
from hivemind.p2p.p2p_daemon_bindings.utils import P2PHandlerError
from hivemind.proto import runtime_pb2

from lilliput import AutoDistributedModelForCausalLM, Server
from lilliput.errors import LilliputError, Unauthorized
from lilliput.models.sources import uid_prefix
from lilliput.server.handler import ConnectionHandler
from lilliput.swarm.identity import Identity
from lilliput.swarm.loop import LoopThread
from lilliput.swarm.membership import introduce
from lilliput.swarm.swarm_key import SwarmKey
from lilliput.wire import lilliput_pb2 as pb
from lilliput.wire.channel import Channel, error_of
from lilliput.wire.protocol import BACKWARD, FORWARD, FORWARD_INCREMENTAL, PUSH

KEY = SwarmKey.generate()
PROMPT = torch.arange(5, 25)[None]
GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "max_new_tokens": 6}
HIDDEN = torch.ones(1, 3, 64)


@pytest.fixture(scope="module")
def servers(tiny_llama: Path) -> Iterator[list[Server]]:
    options: dict[str, Any] = {"dtype": "float32", "cache_tokens": 1024, "swarm_key": KEY}
    with (
        Server(str(tiny_llama), (0, 3), **options) as first,
        Server(str(tiny_llama), (3, 6), initial_peers=first.addresses, **options) as last,
    ):
        yield [first, last]


@pytest.fixture(scope="module")
def model(servers: list[Server], tiny_llama: Path) -> Iterator[Any]:
    model = AutoDistributedModelForCausalLM.from_pretrained(
        str(tiny_llama), initial_peers=servers[0].addresses, swarm_key=KEY, dtype="float32"
    )
    yield model
    model.close()


class Stranger:
    """Speaks to a server of the swarm without a key, with another one or, to show that it can, with the right one."""

    def __init__(self, server: Server, key: SwarmKey | None) -> None:
        assert server.dht
        self.key, self.server, self.peer = key, server, server.dht.peer_id
        self.thread = LoopThread("stranger")
        with tempfile.NamedTemporaryFile() as file:
            file.write(Identity.generate().to_bytes())
            file.flush()
            self.p2p: P2P = self.thread.run(
                P2P.create(
                    initial_peers=server.addresses,
                    identity_path=file.name,
                    check_if_identity_free=False,
                    nat_port_map=False,
                )
            )

    def say(self, call: str, message: pb.Message, **tensors: torch.Tensor) -> str:
        """Open a stream, say one thing, and return the kind of what is answered. Raises what the server objects to."""

        async def say() -> str:
            _, reader, writer = await self.p2p.call_binary_stream_handler(self.peer, call)
            channel = Channel(reader, writer)
            try:
                if self.key:
                    await introduce(self.key, channel, call, self.p2p.peer_id, self.peer)
                await channel.send(message, tensors)
                received = await channel.receive(within=60)
                if received is not None and isinstance(received.body, pb.Error):
                    raise error_of(received.body)
                return "nothing" if received is None else received.kind
            finally:
                channel.close()

        return self.thread.run(say(), 120)

    def unary(self, call: str, tensors: list[torch.Tensor]) -> None:
        """One of hivemind's own calls, as its `RemoteExpert` makes it."""
        uid = f"{uid_prefix(str(self.server.service.model if self.server.service else ''))}.3"
        request = runtime_pb2.ExpertRequest(uid=uid, tensors=[serialize_torch_tensor(tensor) for tensor in tensors])

        async def ask() -> None:
            stub = ConnectionHandler.get_stub(self.p2p, self.peer)
            await getattr(stub, call)(request)

        self.thread.run(ask(), 120)

    def stop(self) -> None:
        self.thread.run(self.p2p.shutdown())
        self.thread.stop()


@contextmanager
def stranger(server: Server, key: SwarmKey | None) -> Iterator[Stranger]:
    one = Stranger(server, key)
    try:
        yield one
    finally:
        one.stop()


def test_servers_push_to_each_other_and_passes_have_gradients(model: Any, whole: Any) -> None:
    with model.inference_session(max_length=64) as session:
        assert model.generate(PROMPT, **GREEDY).tolist() == whole.generate(PROMPT, **GREEDY).tolist()
        # what leaves the first server goes straight to the second one
        assert [stats.bytes_sent > 0 for stats in session.stats] == [True, False]
    embedded = whole.model.embed_tokens(PROMPT).detach()
    mine, theirs = embedded.clone().requires_grad_(), embedded.clone().requires_grad_()
    outputs = model.remote(mine)
    norm, whole.model.norm = whole.model.norm, torch.nn.Identity()
    try:
        expected = whole.model(inputs_embeds=theirs).last_hidden_state
    finally:
        whole.model.norm = norm
    for got in (outputs, expected):
        got.sum().backward()
    assert mine.grad is not None
    for got, right in ((outputs, expected), (mine.grad, theirs.grad)):
        assert (got - right).abs().max() < 1e-4 * right.abs().max()


@pytest.mark.parametrize("key", [None, SwarmKey.generate()], ids=["no key", "another key"])
def test_who_lacks_the_key_cannot_push_nor_compute(key: SwarmKey | None, servers: list[Server], model: Any) -> None:
    last = servers[1]
    assert last.service
    engine = last.service.engine
    with model.inference_session(max_length=64), stranger(last, key) as outside:
        model.generate(PROMPT, **GREEDY)
        counted = (engine.counters.tokens, engine.counters.units)
        (push_key,) = last.service.pushed_sessions  # even who has found out what opens the session to the other server
        push = pb.Push(number=1, push_key=push_key, step=pb.Step(step_id=1 << 30))
        for call, message in (
            (PUSH, pb.Message(push=push)),
            (FORWARD, pb.Message(forward=pb.Forward(start=3, end=6))),
            (BACKWARD, pb.Message(backward=pb.Backward(start=3, end=6))),
            (FORWARD_INCREMENTAL, pb.Message(open=pb.Open(start=3, end=6, rows=1, max_length=8))),
        ):
            with pytest.raises(Unauthorized, match="--swarm-key"):
                outside.say(call, message, hidden=HIDDEN, grad=HIDDEN)
        for call, tensors in (("rpc_forward", [HIDDEN]), ("rpc_backward", [HIDDEN, HIDDEN])):
            with pytest.raises((P2PHandlerError, LilliputError), match="key"):
                outside.unary(call, tensors)
        assert (engine.counters.tokens, engine.counters.units) == counted
        assert len(last.service.pushed_sessions) == 1


def test_a_member_can(servers: list[Server]) -> None:
    """Or the test above would show nothing."""
    with stranger(servers[1], KEY) as member:
        push = pb.Push(number=1, push_key=bytes(16), step=pb.Step(step_id=1))
        assert member.say(PUSH, pb.Message(push=push), hidden=HIDDEN) == "taken"
        forward = pb.Message(forward=pb.Forward(start=3, end=6))
        assert member.say(FORWARD, forward, hidden=HIDDEN) == "output"
