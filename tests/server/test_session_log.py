"""What a server's log says about sessions."""

from __future__ import annotations

import logging

import pytest
import torch
from raw_client import HIDDEN, Peer, wait_until

from lilliput.errors import BadRequest
from lilliput.wire import lilliput_pb2 as pb

ID = b"\x01\x02\x03\x04\x05\x06\x07\x08-and-what-is-too-long"


class Log:
    """What the server has said so far."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog

    @property
    def lines(self) -> list[str]:
        """Messages, each with the request that it names."""
        ours = [record for record in self._caplog.records if record.name.startswith("lilliput.server")]
        return [f"{record.getMessage()} [{getattr(record, 'request_id', '')}]" for record in ours]

    def see(self, *parts: str) -> None:
        wait_until(lambda: any(all(part in line for part in parts) for line in self.lines))


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Log:
    caplog.set_level(logging.INFO, "lilliput.server")
    return Log(caplog)


def test_a_session_is_told_about_with_its_request(peer: Peer, log: Log) -> None:
    session = peer.session(session_id=ID, request_id="req-1", resumes=True)
    log.see("session 0102030405060708 of ", "blocks 0:6, 1 x 256 tokens", "repeats what another", "[req-1]")
    session.go_on(5)
    session.refused(torch.randn(1, 1, HIDDEN + 1))
    log.see("session 0102030405060708", "step 2 failed: ", "[req-1]")
    session.go_on()
    session.bye()
    log.see("closed after ", "2 steps, 6 tokens computed", "[req-1]")


def test_a_step_may_serve_another_request(peer: Peer, log: Log) -> None:
    session = peer.session(request_id="req-1")

    def send(request_id: str) -> None:
        body = pb.Step(step_id=next(session.ids), request_id=request_id)
        session.send(pb.Message(step=body), {"hidden": torch.randn(1, 1, HIDDEN)})

    send("evil\nid")
    assert isinstance(session.error(), BadRequest)
    log.see("step 1 failed: a request id has", "[req-1]")
    send("req-2")
    session.output()
    session.bye()
    log.see("closed after ", "[req-2]")


def test_what_is_refused_is_told_without_a_forged_name(peer: Peer, log: Log) -> None:
    peer.ask(start=3, end=2, request_id="req-3").error()
    log.see("refused: ", "not 3:2", "[req-3]")
    peer.ask(request_id="a\nb").error()
    log.see("refused: a request id has", "[]")
    assert not any("a\nb" in line for line in log.lines)
