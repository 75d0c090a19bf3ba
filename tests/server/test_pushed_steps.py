"""Steps that other servers push into a session: by key, in order, bounded; errors go to the session's client."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch
from raw_client import HIDDEN, Peer, Session, service_of

from lilliput import Server
from lilliput.errors import BadRequest, Busy, ServerFailure
from lilliput.wire import lilliput_pb2 as pb
from lilliput.wire.protocol import PUSH

pytestmark = pytest.mark.usefixtures("nothing_left")


class Pusher:
    """Speaks as another server would."""

    def __init__(self, peer: Peer) -> None:
        self.stream, self.number = peer.stream(PUSH), 0

    def push(self, key: bytes, step: pb.Step, hidden: torch.Tensor, **tensors: torch.Tensor) -> None:
        self.number += 1
        body = pb.Push(number=self.number, push_key=key, step=step, before=[pb.Timing(compute_ms=3.0)])
        self.stream.send(pb.Message(push=body), {"hidden": hidden, **tensors})

    def taken(self) -> None:
        """Wait until all that was pushed has arrived."""
        while self.stream.expect("taken").number < self.number:
            pass


def opened(peer: Peer) -> tuple[Session, bytes]:
    key = os.urandom(16)
    return peer.session(push_key=key, max_length=512), key


def test_the_client_gets_the_outputs_of_what_was_pushed(server: Server, peer: Peer) -> None:
    session, key = opened(peer)
    pusher, hidden = Pusher(peer), torch.randn(1, 5, HIDDEN)
    pusher.push(key, pb.Step(step_id=1), hidden)
    pusher.taken()
    body, _ = session.output()
    assert (body.step_id, body.length, [timing.compute_ms for timing in body.before]) == (1, 5, [3.0])
    session.remember(hidden)
    next(session.ids)
    session.go_on(3)
    session.bye()
    assert not service_of(server).pushed_sessions
    pusher.push(key, pb.Step(step_id=9), hidden)  # too late, and harmless
    pusher.taken()
    pusher.stream.close()


def test_what_is_late_is_refused_and_rolls_nothing_back(peer: Peer) -> None:
    session, key = opened(peer)
    session.ids = iter(range(10, 99))  # type: ignore[assignment]
    session.go_on(5)
    pusher = Pusher(peer)
    pusher.push(key, pb.Step(step_id=7, start_position=0), torch.randn(1, 2, HIDDEN))
    error: Any = session.error()
    assert isinstance(error, ServerFailure)
    assert error.body.step_id == 7
    session.go_on(1)
    session.bye()
    pusher.stream.close()


def test_mistakes_are_told_to_the_client(peer: Peer) -> None:
    session, key = opened(peer)
    pusher = Pusher(peer)
    pusher.push(key, pb.Step(step_id=1), torch.full((1, 2, HIDDEN), float("nan")))
    assert isinstance(session.error(), BadRequest)
    prompts = torch.zeros(6, 1, 2, HIDDEN)
    pusher.push(key, pb.Step(step_id=2, route=[pb.Next()]), torch.randn(1, 2, HIDDEN), prompts=prompts)
    assert isinstance(session.error(), BadRequest)
    pusher.taken()
    session.ids = iter(range(3, 99))  # type: ignore[assignment]
    session.go_on(4)
    session.bye()
    pusher.stream.close()


def test_no_flood(server: Server, peer: Peer) -> None:
    session, key = opened(peer)
    gate = threading.Event()
    service_of(server).engine.call(gate.wait)
    pusher = Pusher(peer)
    for number in range(1, 41):
        pusher.push(key, pb.Step(step_id=number), torch.randn(1, 1, HIDDEN))
    for _ in range(40 - 16):
        assert isinstance(session.error(), Busy)
    pusher.taken()
    gate.set()
    for _ in range(16):
        session.output()
    session.bye()
    pusher.stream.close()


def test_a_reordering_is_done_once(peer: Peer) -> None:
    key = os.urandom(16)
    session = peer.session(push_key=key, rows=2)
    first = torch.randn(2, 4, HIDDEN)
    session.step(first)
    session.remember(first)
    pusher, hidden = Pusher(peer), torch.randn(2, 1, HIDDEN)
    for step_id in (5, 6):
        step = pb.Step(step_id=step_id, parents=[1, 0], reordering=5, start_position=4)
        pusher.push(key, step, hidden)
        session.output()
    session.remember(hidden, parents=[1, 0])
    session.ids = iter(range(7, 99))  # type: ignore[assignment]
    session.go_on(1)
    session.bye()
    pusher.stream.close()


def test_who_cannot_be_reached_is_left_to_the_client(peer: Peer) -> None:
    session, _ = opened(peer)
    nobody = "12D3KooWS27M6oPeJ9xnpepDXPmQ6x12nLW9HW5h8G5tajeTcZnP"
    for step_id, who in enumerate((nobody, "no peer id"), start=1):
        step = pb.Step(step_id=step_id, route=[pb.Next(peer=who, push_key=b"?" * 16)])
        session.send(pb.Message(step=step), {"hidden": torch.randn(1, 2, HIDDEN)})
        body, hidden = session.output()
        assert body.unpushed
        assert hidden.shape == (1, 2, HIDDEN)
    session.bye()


def test_a_key_is_for_one_session(peer: Peer) -> None:
    session, key = opened(peer)
    with pytest.raises(BadRequest, match="push key"):
        peer.session(push_key=key)
    with pytest.raises(BadRequest, match="push key"):
        peer.session(push_key=b"short")
    session.bye()
