"""Whatever a client sends: a coded error for it, and nobody else notices.

In all these tests someone else generates, and at the end all that they got is compared with the plain model.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from raw_client import BLOCKS, HIDDEN, Bystander, Peer, Session, Stream, service_of

from lilliput import Server
from lilliput.errors import BadRequest, LilliputError, MissingAdapter, ServerFailure, WrongBlocks
from lilliput.wire import lilliput_pb2 as pb
from lilliput.wire.protocol import BACKWARD, FORWARD, FORWARD_INCREMENTAL

pytestmark = pytest.mark.usefixtures("bystander")

NAN, INFINITY = float("nan"), float("inf")


@pytest.fixture
def session(peer: Peer) -> Iterator[Session]:
    """Two rows with 35 tokens; when the test is over, it must still compute as the plain model does."""
    session = peer.session(rows=3, max_length=100)
    session.go_on(35, rows=2)
    yield session
    session.go_on()
    session.go_on(4)
    session.bye()


def hidden(rows: int = 2, tokens: int = 1, width: int = HIDDEN) -> torch.Tensor:
    return torch.randn(rows, tokens, width)


def poisoned(value: float, rows: int = 2, tokens: int = 3) -> torch.Tensor:
    tensor = torch.randn(rows, tokens, HIDDEN)
    tensor[-1, -1, 5] = value
    return tensor


BAD_STEPS: dict[str, Callable[[], dict[str, Any]]] = {
    "no hidden states": lambda: {"hidden": None},
    "other names": lambda: {"hidden": None, "hiden": hidden()},
    "a tensor too many": lambda: {"hidden": hidden(), "extra": hidden()},
    "too wide": lambda: {"hidden": hidden(width=HIDDEN + 1)},
    "no width": lambda: {"hidden": torch.randn(2, 1)},
    "a number": lambda: {"hidden": torch.tensor(1.0)},
    "a number, page keys": lambda: {"hidden": torch.tensor(1.0), "hashes": b"x" * 16},
    "four dimensions": lambda: {"hidden": torch.randn(1, 2, 1, HIDDEN)},
    "integers": lambda: {"hidden": torch.ones(2, 1, HIDDEN, dtype=torch.int64)},
    "booleans": lambda: {"hidden": torch.ones(2, 1, HIDDEN, dtype=torch.bool)},
    "NaN": lambda: {"hidden": poisoned(NAN)},
    "infinity": lambda: {"hidden": poisoned(-INFINITY)},
    "more than float32 holds": lambda: {"hidden": poisoned(1e30).double() ** 9},
    "NaN in float16": lambda: {"hidden": poisoned(NAN), "codec": "float16"},
    "NaN in int8": lambda: {"hidden": poisoned(NAN), "codec": "int8"},
    "no rows": lambda: {"hidden": torch.zeros(0, 1, HIDDEN)},
    "no rows, page keys": lambda: {"hidden": torch.zeros(0, 1, HIDDEN), "hashes": b"x" * 16},
    "no tokens": lambda: {"hidden": torch.zeros(2, 0, HIDDEN)},
    "no width at all": lambda: {"hidden": torch.zeros(2, 1, 0), "codec": "int8"},
    "a row too few": lambda: {"hidden": hidden(rows=1)},
    "a row too many": lambda: {"hidden": hidden(rows=3)},
    "more rows than opened for": lambda: {"hidden": hidden(rows=4), "parents": [0, 0, 0, 0]},
    "a parent that is not there": lambda: {"hidden": hidden(), "parents": [0, 2]},
    "a parent far away": lambda: {"hidden": hidden(), "parents": [0, (1 << 32) - 1]},
    "too few parents": lambda: {"hidden": hidden(), "parents": [0]},
    "too many parents": lambda: {"hidden": hidden(), "parents": [0, 1, 0]},
    "a million parents": lambda: {"hidden": hidden(), "parents": [0] * 1_000_000},
    "a start beyond the end": lambda: {"hidden": hidden(), "start_position": 36},
    "a start far beyond": lambda: {"hidden": hidden(), "start_position": (1 << 32) - 1},
    "a short mask": lambda: {"hidden": hidden(), "mask": torch.ones(1, 1, 35, dtype=torch.bool)},
    "a long mask": lambda: {"hidden": hidden(), "mask": torch.ones(1, 1, 37, dtype=torch.bool)},
    "a mask of other rows": lambda: {"hidden": hidden(), "mask": torch.ones(3, 1, 36, dtype=torch.bool)},
    "a mask of numbers": lambda: {"hidden": hidden(), "mask": torch.zeros(1, 1, 36)},
    "a mask that is a number": lambda: {"hidden": hidden(), "mask": torch.tensor(True)},
    "a mask for the old length": lambda: {
        "hidden": hidden(),
        "mask": torch.ones(1, 1, 36, dtype=torch.bool),
        "start_position": 30,
    },
    "a large mask": lambda: {"hidden": hidden(), "mask": torch.ones(8, 1024, 8192, dtype=torch.bool)},
    "negative positions": lambda: {"hidden": hidden(), "position_ids": torch.tensor([[3], [-1]])},
    "enormous positions": lambda: {"hidden": hidden(), "position_ids": torch.tensor([[3], [1 << 40]])},
    "the most negative position": lambda: {"hidden": hidden(), "position_ids": torch.tensor([[0], [-(1 << 63)]])},
    "positions that are no integers": lambda: {"hidden": hidden(), "position_ids": torch.tensor([[3.0], [4.0]])},
    "positions of other rows": lambda: {"hidden": hidden(), "position_ids": torch.tensor([[3, 4]])},
    "no positions": lambda: {"hidden": hidden(), "position_ids": torch.zeros(2, 0, dtype=torch.int64)},
    "prompts for other blocks": lambda: {"hidden": hidden(), "prompts": torch.randn(BLOCKS - 1, 2, 1, HIDDEN)},
    "prompts of other rows": lambda: {"hidden": hidden(), "prompts": torch.randn(BLOCKS, 1, 1, HIDDEN)},
    "prompts that are integers": lambda: {
        "hidden": hidden(),
        "prompts": torch.zeros(BLOCKS, 2, 1, HIDDEN, dtype=torch.int32),
    },
    "NaN in prompts": lambda: {"hidden": hidden(), "prompts": torch.full((BLOCKS, 2, 1, HIDDEN), NAN)},
    "broken page keys": lambda: {"hidden": hidden(), "hashes": b"x" * 31},
    "page keys of one row": lambda: {"hidden": hidden(), "hashes": b"x" * 16},
}


@pytest.mark.parametrize("what", BAD_STEPS)
def test_a_bad_step_is_refused_and_its_session_goes_on(session: Session, what: str) -> None:
    refusal = session.refused(**BAD_STEPS[what]())
    assert isinstance(refusal, BadRequest)
    assert len(str(refusal)) > 10
    assert not refusal.body.retry_elsewhere  # type: ignore[attr-defined]


def test_many_bad_steps_in_a_row_and_between_good_ones(session: Session) -> None:
    for make in BAD_STEPS.values():
        session.refused(**make())
        session.go_on(1, start_position=34)


@pytest.mark.parametrize("what", ["NaN", "a short mask", "a parent that is not there", "too wide", "no hidden states"])
def test_a_bad_first_step(peer: Peer, what: str) -> None:
    session = peer.session(rows=3)
    fields = BAD_STEPS[what]()
    session.refused(**{"parents": [0, 1], **fields} if what == "a parent that is not there" else fields)
    session.go_on(12, rows=2)
    session.bye()


def test_parents_before_there_are_rows(peer: Peer) -> None:
    session = peer.session(rows=2)
    assert isinstance(session.refused(hidden(), parents=[0, 0]), BadRequest)
    session.go_on(3, rows=2)
    session.bye()


def test_a_step_before_the_session_is_accepted(server: Server, peer: Peer) -> None:
    large = peer.session(rows=3, max_length=2048)
    waiting = peer.ask(rows=2, max_length=2048)
    assert not waiting.expect("info").accepted
    refusal = waiting.refused(hidden())
    assert isinstance(refusal, BadRequest)
    assert "accepted" in str(refusal)
    large.bye()
    while not waiting.expect("info").accepted:
        pass
    waiting.go_on(3, rows=2)
    waiting.bye()


def test_messages_that_only_a_server_sends(session: Session) -> None:
    for message in (pb.Message(info=pb.Info()), pb.Message(output=pb.Output()), pb.Message(error=pb.Error())):
        session.send(message)
        assert isinstance(session.error(), BadRequest)
    for message in (pb.Message(pong=pb.Pong()), pb.Message(forward=pb.Forward(end=1))):
        session.send(message)
        assert isinstance(session.error(), BadRequest)


# ---- numbers that break the arithmetic ----


@pytest.mark.parametrize("value", [1e38, -3e38, 1e19, 1e-40])
def test_enormous_numbers_harm_only_those_who_send_them(server: Server, peer: Peer, value: float) -> None:
    """Whatever comes of them, NaN or numbers: it is not found in pages that others get afterwards."""
    for tokens in (100, 1):
        session = peer.session(rows=2, max_length=128)
        session.submit(torch.full((2, tokens, HIDDEN), value))
        session.receive()
        session.close()
    assert_clean_pages(server, peer)


@pytest.mark.parametrize("tokens", [1, 3, 70])
def test_a_step_whose_outputs_are_not_numbers_is_forgotten(server: Server, peer: Peer, tokens: int) -> None:
    session = peer.session(rows=2, max_length=128)
    session.go_on(40, rows=2)
    refusal = session.refused(
        torch.full((2, tokens, HIDDEN), 3e38), prompts=torch.full((BLOCKS, 2, tokens, HIDDEN), 3e38)
    )
    assert isinstance(refusal, ServerFailure)
    session.go_on(1)  # into the page that the failed step had written to
    session.go_on(5)
    session.go_on(1, parents=[1, 1])
    refusal = session.refused(
        torch.full((2, tokens, HIDDEN), 3e38), prompts=torch.full((BLOCKS, 2, tokens, HIDDEN), 3e38)
    )
    session.go_on(1, start_position=38)
    session.bye()
    assert_clean_pages(server, peer)


def test_a_first_step_whose_outputs_are_not_numbers(server: Server, peer: Peer) -> None:
    session = peer.session(rows=2, max_length=128)
    session.refused(torch.full((2, 50, HIDDEN), 3e38), prompts=torch.full((BLOCKS, 2, 50, HIDDEN), 3e38))
    session.go_on(3, rows=2)
    session.bye()
    assert_clean_pages(server, peer)


def assert_clean_pages(server: Server, peer: Peer) -> None:
    """A session that gets all pages that are free computes as the plain model does, in the first slots of each."""
    rows = service_of(server).admission.free_tokens // 32
    session = peer.session(rows=rows, max_length=32)
    for tokens in (3, 1):
        session.go_on(tokens, rows=rows)
    session.bye()


# ---- bytes that are no messages ----


def step_header(**fields: Any) -> pb.Message:
    tensor = pb.Tensor(
        **{"name": "hidden", "dtype": "float32", "shape": [1, 1, HIDDEN], "nbytes": HIDDEN * 4, **fields}
    )
    return pb.Message(step=pb.Step(step_id=1), tensors=[tensor])


def framed(message: pb.Message) -> bytes:
    data = message.SerializeToString()
    return struct.pack("!I", len(data)) + data


BAD_BYTES: dict[str, Callable[[], bytes]] = {
    "10 MB of garbage": lambda: b"\xff" + os.urandom(10 << 20),
    "10 MB of zeros": lambda: bytes(10 << 20),
    "10 MB of text": lambda: b"GET / HTTP/1.1\r\n" * 700_000,
    "a header of 3 GB": lambda: struct.pack("!I", 3 << 30) + bytes(1 << 20),
    "a header that is no message": lambda: struct.pack("!I", 100) + b"\xff" * 100,
    "an empty message": lambda: struct.pack("!I", 0),
    "3 GB of tensors announced": lambda: framed(step_header(shape=[12, 1 << 20, HIDDEN], nbytes=3 << 30)),
    "half of the zettabytes": lambda: framed(step_header(shape=[(1 << 32) - 1] * 4, nbytes=(1 << 64) - 1)),
    "1 GB of booleans": lambda: framed(step_header(name="mask", dtype="bool", shape=[1 << 15] * 2, nbytes=1 << 27)),
    "another size than the shape has": lambda: framed(step_header(nbytes=HIDDEN * 4 - 1)) + bytes(HIDDEN * 4),
    "an unknown dtype": lambda: framed(step_header(dtype="float3")),
    "an unknown codec": lambda: framed(step_header(codec="zip")),
    "five dimensions": lambda: framed(step_header(shape=[1] * 4 + [HIDDEN])),
    "nothing, enormously": lambda: framed(step_header(shape=[(1 << 32) - 1] * 3 + [0], nbytes=0)),
    "nothing, in booleans": lambda: framed(step_header(dtype="bool", shape=[(1 << 32) - 1] * 3 + [0], nbytes=0)),
    "nine tensors": lambda: framed(
        pb.Message(step=pb.Step(), tensors=[pb.Tensor(name=str(i), dtype="bool", shape=[0]) for i in range(9)])
    ),
}


@pytest.mark.parametrize(
    ("handler", "what"),
    [
        *((FORWARD_INCREMENTAL, what) for what in BAD_BYTES),
        (FORWARD, "10 MB of garbage"),
        (BACKWARD, "an empty message"),
    ],
)
def test_bytes_that_are_no_message_end_the_stream_with_an_error(
    server: Server, peer: Peer, what: str, handler: str
) -> None:
    stream: Stream = peer.session() if handler == FORWARD_INCREMENTAL else peer.stream(handler)
    stream.send_bytes(BAD_BYTES[what]())
    refusal = stream.error()
    assert isinstance(refusal, BadRequest)
    assert refusal.body.closed  # type: ignore[attr-defined]
    assert stream.ended()
    stream.close()


def test_10_mb_of_garbage_before_anything_else(peer: Peer) -> None:
    stream = peer.stream()
    stream.send_bytes(b"\xff" + os.urandom(10 << 20))
    assert isinstance(stream.error(), BadRequest)
    assert stream.ended()
    stream.close()


@pytest.mark.parametrize("part", [2, 20, -5])
def test_half_a_message_and_then_the_end(server: Server, peer: Peer, part: int) -> None:
    session = peer.session()
    session.go_on(40)
    session.send_bytes((framed(step_header()) + bytes(HIDDEN * 4))[:part])
    session.close()


def test_a_stream_without_a_single_byte(peer: Peer) -> None:
    peer.stream().close()


def test_a_long_name_does_not_come_back_whole(session: Session) -> None:
    refusal = session.refused(hidden(), **{"x" * 500_000: torch.zeros(1)})
    assert len(str(refusal)) < 10_000


# ---- passes ----

BAD_PASSES: dict[str, Callable[[], tuple[dict[str, Any], dict[str, torch.Tensor]]]] = {
    "other blocks": lambda: ({"end": BLOCKS + 1}, {"hidden": hidden()}),
    "no blocks": lambda: ({"start": 2, "end": 2}, {"hidden": hidden()}),
    "another model": lambda: ({"model": "another"}, {"hidden": hidden()}),
    "an unknown codec": lambda: ({"codec": "zip"}, {"hidden": hidden()}),
    "an unknown adapter": lambda: ({"adapter": "lora"}, {"hidden": hidden()}),
    "no hidden states": lambda: ({}, {}),
    "a tensor too many": lambda: ({}, {"hidden": hidden(), "extra": hidden()}),
    "too wide": lambda: ({}, {"hidden": hidden(width=HIDDEN + 1)}),
    "a number": lambda: ({}, {"hidden": torch.tensor(1.0)}),
    "no rows": lambda: ({}, {"hidden": torch.zeros(0, 3, HIDDEN)}),
    "no tokens": lambda: ({}, {"hidden": torch.zeros(3, 0, HIDDEN)}),
    "too long": lambda: ({}, {"hidden": hidden(tokens=2049)}),
    "integers": lambda: ({}, {"hidden": torch.ones(2, 1, HIDDEN, dtype=torch.int64)}),
    "NaN": lambda: ({}, {"hidden": poisoned(NAN)}),
    "more than float32 holds": lambda: ({}, {"hidden": torch.full((1, 1, HIDDEN), 1e300, dtype=torch.float64)}),
    "a short mask": lambda: ({}, {"hidden": hidden(tokens=4), "mask": torch.ones(1, 4, 3, dtype=torch.bool)}),
    "a mask of numbers": lambda: ({}, {"hidden": hidden(tokens=4), "mask": torch.ones(1, 4, 4)}),
    "negative positions": lambda: ({}, {"hidden": hidden(), "position_ids": torch.tensor([[3], [-1]])}),
    "enormous positions": lambda: ({}, {"hidden": hidden(), "position_ids": torch.tensor([[3], [1 << 40]])}),
    "positions that are no integers": lambda: (
        {},
        {"hidden": hidden(), "position_ids": torch.tensor([[True], [True]])},
    ),
    "prompts for other blocks": lambda: ({}, {"hidden": hidden(), "prompts": torch.randn(BLOCKS - 1, 2, 1, HIDDEN)}),
    "infinite prompts": lambda: ({}, {"hidden": hidden(), "prompts": torch.full((BLOCKS, 2, 1, HIDDEN), INFINITY)}),
}
BAD_GRADIENTS: dict[str, Callable[[], tuple[dict[str, Any], dict[str, torch.Tensor]]]] = {
    "no gradients": lambda: ({}, {"hidden": hidden()}),
    "gradients of another shape": lambda: ({}, {"hidden": hidden(), "grad": hidden(tokens=2)}),
    "gradients that are integers": lambda: (
        {},
        {"hidden": hidden(), "grad": torch.ones(2, 1, HIDDEN, dtype=torch.int64)},
    ),
    "NaN in gradients": lambda: ({}, {"hidden": hidden(tokens=3), "grad": poisoned(NAN)}),
}


def test_a_bad_pass_is_refused_and_its_stream_goes_on(peer: Peer) -> None:
    forward, backward = peer.stream(FORWARD), peer.stream(BACKWARD)

    def refused(kind: str, what: str, fields: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        stream, message = (backward, pb.Backward) if kind == "backward" else (forward, pb.Forward)
        stream.send(pb.Message(**{kind: message(**{"start": 0, "end": BLOCKS, **fields})}), tensors)
        refusal: LilliputError = stream.error()
        others = {"an unknown adapter": MissingAdapter}
        others |= dict.fromkeys(("other blocks", "no blocks", "another model"), WrongBlocks)
        assert type(refusal) is others.get(what, BadRequest), what
        assert not refusal.body.closed  # type: ignore[attr-defined]

    for what, make in BAD_PASSES.items():
        refused("forward", what, *make())
        fields, tensors = make()
        refused("backward", what, fields, {**tensors, "grad": tensors.get("hidden", torch.zeros(1, 1, HIDDEN))})
    for what, make in BAD_GRADIENTS.items():
        refused("backward", what, *make())
    for stream, message in ((forward, pb.Message(ping=pb.Ping())), (backward, pb.Message(forward=pb.Forward()))):
        stream.send(message)
        assert isinstance(stream.error(), BadRequest)
    inputs = hidden(tokens=5)
    forward.send(pb.Message(forward=pb.Forward(start=0, end=BLOCKS)), {"hidden": inputs})
    assert forward.expect("output") is not None
    backward.send(pb.Message(backward=pb.Backward(start=0, end=BLOCKS)), {"hidden": inputs, "grad": inputs})
    assert backward.expect("output") is not None
    forward.close()
    backward.close()


def test_the_bystander_is_not_alone(server: Server, bystander: Bystander) -> None:
    """The tests above mean something: the bystander's steps were computed in between."""
    before = bystander.steps
    bystander.at_least(5)
    assert bystander.steps >= before + 5
    assert service_of(server).admission.running == 1
