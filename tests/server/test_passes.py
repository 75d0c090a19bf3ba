"""Forward and backward passes over a span, without caches: for training and scoring."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from raw_client import BLOCKS, HIDDEN, PATIENCE, TOLERANCE, Peer, Stream, Whole, difference, service_of, wait_until

from lilliput import Server
from lilliput.engine.training import Pass
from lilliput.errors import Busy, LilliputError
from lilliput.wire import lilliput_pb2 as pb
from lilliput.wire.protocol import BACKWARD, FORWARD

pytestmark = pytest.mark.usefixtures("nothing_left")


def forward(stream: Stream, hidden: torch.Tensor, start: int = 0, end: int = BLOCKS, **options: Any) -> torch.Tensor:
    codec = options.pop("codec", "none")
    stream.send(pb.Message(forward=pb.Forward(start=start, end=end, codec=codec)), {"hidden": hidden, **options}, codec)
    received = stream.thread.run(stream.channel.expect("output"), PATIENCE)
    return received.tensors["hidden"]


def backward(
    stream: Stream, hidden: torch.Tensor, grad: torch.Tensor, start: int = 0, end: int = BLOCKS, **options: Any
) -> torch.Tensor:
    message = pb.Message(backward=pb.Backward(start=start, end=end))
    stream.send(message, {"hidden": hidden, "grad": grad, **options})
    return stream.thread.run(stream.channel.expect("output"), PATIENCE).tensors["grad"]


@pytest.mark.parametrize(("start", "end"), [(0, BLOCKS), (2, 3), (1, 5)])
@pytest.mark.parametrize("rows", [1, 5])
def test_forward_and_backward_equal_local_ones(peer: Peer, whole: Whole, start: int, end: int, rows: int) -> None:
    hidden, grad = torch.randn(rows, 33, HIDDEN), torch.randn(rows, 33, HIDDEN)
    inputs = hidden.clone().requires_grad_()
    expected = whole(inputs, start, end)
    expected.backward(grad)
    assert inputs.grad is not None
    streams = peer.stream(FORWARD), peer.stream(BACKWARD)
    assert difference(forward(streams[0], hidden, start, end), expected.detach()) < TOLERANCE
    assert difference(backward(streams[1], hidden, grad, start, end), inputs.grad) < TOLERANCE
    for stream in streams:
        stream.close()


def test_masks_positions_and_prompts(peer: Peer, whole: Whole) -> None:
    mask = torch.rand(2, 20, 20) > 0.4
    mask |= torch.eye(20, dtype=torch.bool)
    options = {
        "mask": mask,
        "position_ids": torch.stack([torch.arange(20) + 3, torch.arange(20) * 2]),
        "prompts": torch.randn(3, 2, 20, HIDDEN) * 0.3,
    }
    hidden, grad = torch.randn(2, 20, HIDDEN), torch.randn(2, 20, HIDDEN)
    inputs = hidden.clone().requires_grad_()
    expected = whole(inputs, 1, 4, **options)
    expected.backward(grad)
    assert inputs.grad is not None
    streams = peer.stream(FORWARD), peer.stream(BACKWARD)
    assert difference(forward(streams[0], hidden, 1, 4, **options), expected.detach()) < TOLERANCE
    assert difference(backward(streams[1], hidden, grad, 1, 4, **options), inputs.grad) < TOLERANCE
    options["mask"] = torch.ones(20, 20, dtype=torch.bool)  # without rows, and all may look ahead
    expected = whole(hidden, 1, 4, **{**options, "mask": options["mask"][None]})
    assert difference(forward(streams[0], hidden, 1, 4, **options), expected) < TOLERANCE
    for stream in streams:
        stream.close()


def test_padding_that_attends_to_nothing(peer: Peer, whole: Whole) -> None:
    """It attends to itself, as in a session, and harms no gradient."""
    mask = torch.ones(2, 12, 12, dtype=torch.bool).tril()
    mask[1, :, :5] = False
    hidden, grad = torch.randn(2, 12, HIDDEN), torch.randn(2, 12, HIDDEN)
    inputs = hidden.clone().requires_grad_()
    expected = whole(inputs, mask=mask | torch.eye(12, dtype=torch.bool))
    expected.backward(grad)
    assert inputs.grad is not None
    streams = peer.stream(FORWARD), peer.stream(BACKWARD)
    assert difference(forward(streams[0], hidden, mask=mask), expected.detach()) < TOLERANCE
    assert difference(backward(streams[1], hidden, grad, mask=mask), inputs.grad) < TOLERANCE
    for stream in streams:
        stream.close()


def test_a_large_pass_and_several_on_one_stream(peer: Peer, whole: Whole) -> None:
    """8 MB, cut into several units of rows."""
    stream = peer.stream(FORWARD)
    hidden = torch.randn(33, 1000, HIDDEN)
    got = forward(stream, hidden, 4, 6)
    assert difference(got[[0, 13, 32]], whole(hidden[[0, 13, 32]], 4, 6)) < TOLERANCE
    for tokens in (1, 7):
        hidden = torch.randn(2, tokens, HIDDEN)
        assert difference(forward(stream, hidden), whole(hidden)) < TOLERANCE
    stream.close()


@pytest.mark.parametrize(("codec", "tolerance"), [("float16", 2e-3), ("bfloat16", 2e-2), ("int8", 5e-2)])
def test_codecs(peer: Peer, whole: Whole, codec: str, tolerance: float) -> None:
    stream = peer.stream(FORWARD)
    hidden = torch.randn(1, 9, HIDDEN).bfloat16().float() * 0.5
    assert difference(forward(stream, hidden, 0, 2, codec=codec), whole(hidden, 0, 2)) < tolerance
    stream.close()


def test_training_and_generation_go_on_side_by_side(server: Server, peer: Peer, stranger: Peer) -> None:
    """Steps are computed while one pass is under way, and the pass is computed while steps keep coming."""
    engine = service_of(server).engine
    finished: list[str] = []
    done = threading.Event()

    def trained(result: torch.Tensor | LilliputError) -> None:
        finished.append("pass" if isinstance(result, torch.Tensor) else "error")
        done.set()

    session = peer.session(max_length=2048)
    session.go_on(20)
    steps_before = engine.counters.steps
    hidden = torch.randn(5, 1000, HIDDEN)  # row by row, 6 blocks there and back: 60 units
    engine.run_pass(Pass(0, BLOCKS, hidden, grad=hidden, done=trained))
    during = 0
    while not done.is_set():
        session.go_on(1, start_position=20)
        during += not done.is_set()
        finished.append("step")
    assert finished.count("pass") == 1
    assert "error" not in finished
    assert during >= 3  # about twelve, where nothing else runs; none, if a pass could not be interrupted
    assert engine.counters.steps - steps_before >= during
    session.bye()


def test_several_passes_take_turns(server: Server) -> None:
    """A short pass does not wait for a long one to end."""
    engine = service_of(server).engine
    order: list[str] = []

    def submit(name: str, rows: int) -> None:
        engine.run_pass(Pass(0, BLOCKS, torch.randn(rows, 1000, HIDDEN), done=lambda result: order.append(name)))

    submit("long", 8)
    submit("short", 1)
    wait_until(lambda: len(order) == 2)
    assert order == ["short", "long"]


def test_a_pass_whose_client_is_gone_is_given_up(server: Server, peer: Peer) -> None:
    engine = service_of(server).engine
    gate = threading.Event()
    engine.call(gate.wait)
    streams = [peer.stream(FORWARD) for _ in range(3)]
    for stream in streams:
        stream.send(pb.Message(forward=pb.Forward(start=0, end=BLOCKS)), {"hidden": torch.randn(64, 1000, HIDDEN)})
    # all have arrived, none was begun
    wait_until(lambda: len(engine._inbox) == 3)
    for stream in streams:
        stream.close()
    units = engine.counters.units
    wait_until(lambda: service_of(server).passes == 0)
    gate.set()
    engine.call(lambda: None).result(PATIENCE)
    wait_until(lambda: not engine._passes)
    assert engine.counters.units - units <= 3


def test_too_many_passes_at_a_time(server: Server, peer: Peer) -> None:
    service = service_of(server)
    gate = threading.Event()
    service.engine.call(gate.wait)
    limit, service.max_passes = service.max_passes, 2
    try:
        streams = [peer.stream(FORWARD) for _ in range(3)]
        for count, stream in enumerate(streams, 1):
            stream.send(pb.Message(forward=pb.Forward(start=0, end=BLOCKS)), {"hidden": torch.randn(1, 3, HIDDEN)})
            wait_until(lambda count=count: service.passes == min(count, 2))
        assert isinstance(streams[2].error(), Busy)
    finally:
        service.max_passes = limit
        gate.set()
    for stream in streams[:2]:
        stream.expect("output")
    assert forward(streams[2], torch.randn(1, 3, HIDDEN)) is not None
    for stream in streams:
        stream.close()
