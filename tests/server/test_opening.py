"""Opening a session: what the server promises, and what it refuses."""

from __future__ import annotations

import math

import pytest
from raw_client import BLOCKS, Peer, assert_nothing_left, service_of

from lilliput import Server
from lilliput.errors import BadRequest, CacheFull, MissingAdapter, TooLong, WrongBlocks
from lilliput.wire import lilliput_pb2 as pb
from lilliput.wire.channel import Channel


def test_the_answer_says_accepted_and_what_to_expect(server: Server, peer: Peer) -> None:
    session = peer.session(rows=2, max_length=100, model=service_of(server).model)
    info = session.info
    assert info.accepted
    assert (info.queue_length, info.start_seconds, info.cached_tokens) == (0, 0.0, 0)
    assert info.max_length == 2048
    assert info.max_step_tokens == 1024
    assert math.isfinite(info.tokens_per_second)
    assert info.tokens_per_second > 0
    assert service_of(server).admission.promised == 2 * 4  # pages of 32 tokens
    assert service_of(server).engine.pool.used == 0  # promised, not taken
    session.bye()
    assert_nothing_left(server)


def test_a_session_may_ask_for_everything_the_server_has(server: Server, peer: Peer) -> None:
    session = peer.session(rows=4, max_length=2048)
    assert service_of(server).admission.free_tokens == 0
    session.go_on(40)
    session.bye()
    assert_nothing_left(server)


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"model": "another"}, WrongBlocks, "not another"),
        ({"start": 0, "end": BLOCKS + 1}, WrongBlocks, f"0:{BLOCKS}"),
        ({"start": 7, "end": 9}, WrongBlocks, "7:9"),
        ({"start": 3, "end": 3}, WrongBlocks, "3:3"),
        ({"start": 4, "end": 2}, WrongBlocks, "4:2"),
        ({"rows": 0}, BadRequest, "rows"),
        ({"rows": 1 << 31}, BadRequest, "rows"),
        ({"max_length": 0}, BadRequest, "max_length"),
        ({"max_length": 2049}, TooLong, "2048"),
        ({"max_length": (1 << 32) - 1}, TooLong, "2048"),
        ({"rows": 5, "max_length": 2048}, CacheFull, "8192"),
        ({"bid": math.nan}, BadRequest, "bid"),
        ({"codec": "zip"}, BadRequest, "float16"),
        ({"adapter": "lora"}, MissingAdapter, "lora"),
        ({"prefix": b"x" * 17}, BadRequest, "keys"),
        ({"request_id": "a\n12:00:00 I server: b"}, BadRequest, "request id"),
        ({"request_id": "x" * 129}, BadRequest, "request id"),
        ({"prefix": b"x" * 16, "rows": 2}, BadRequest, "keys"),
    ],
)
def test_what_cannot_be_served_is_refused_and_the_reason_told(
    server: Server, peer: Peer, fields: dict[str, object], error: type[Exception], words: str
) -> None:
    session = peer.ask(**fields)  # type: ignore[arg-type]
    refusal = session.error()
    assert type(refusal) is error
    assert words in str(refusal)
    assert refusal.body.closed  # type: ignore[attr-defined]
    assert refusal.body.retry_elsewhere == error.retry_elsewhere  # type: ignore[attr-defined]
    assert session.ended()
    assert_nothing_left(server)


@pytest.mark.parametrize("codec", ["", "none", "float16", "bfloat16", "int8"])
@pytest.mark.parametrize("bid", [0.0, -1.5, math.inf])
def test_any_codec_and_any_bid_is_welcome(peer: Peer, codec: str, bid: float) -> None:
    session = peer.session(codec=codec, bid=bid)
    session.ping()
    session.bye()


@pytest.mark.parametrize(
    "message",
    [
        pb.Message(step=pb.Step(step_id=1)),
        pb.Message(ping=pb.Ping(id=1)),
        pb.Message(close=pb.Close()),
        pb.Message(info=pb.Info(accepted=True)),
    ],
)
def test_a_session_begins_with_open_and_nothing_else(server: Server, peer: Peer, message: pb.Message) -> None:
    stream = peer.stream()
    stream.send(pb.Message.FromString(message.SerializeToString()))
    refusal = stream.error()
    assert isinstance(refusal, BadRequest)
    assert refusal.body.closed  # type: ignore[attr-defined]
    assert stream.ended()
    assert_nothing_left(server)


def test_opening_twice_is_refused_and_the_session_goes_on(peer: Peer) -> None:
    session = peer.session()
    session.go_on(5)
    session.send(pb.Message(open=pb.Open(start=0, end=1, rows=1, max_length=8)))
    refusal = session.error()
    assert isinstance(refusal, BadRequest)
    assert not refusal.body.closed  # type: ignore[attr-defined]
    session.go_on()
    session.bye()


def test_several_sessions_of_one_peer_and_of_several_run_side_by_side(peer: Peer, stranger: Peer) -> None:
    sessions = [who.session(0, BLOCKS) for who in (peer, stranger, peer, stranger)]
    for tokens in (9, 1, 3, 1):
        for session in sessions:
            session.go_on(tokens)
    for session in sessions:
        session.bye()


def test_a_message_never_leaves_more_to_read_than_it_says(peer: Peer) -> None:
    # two messages written in one go are read one after the other
    session = peer.session()

    async def two() -> None:
        channel: Channel = session.channel
        await channel.send(pb.Message(ping=pb.Ping(id=1)))
        await channel.send(pb.Message(ping=pb.Ping(id=2)))

    session.thread.run(two())
    assert [session.expect("pong").id for _ in range(2)] == [1, 2]
    session.bye()
