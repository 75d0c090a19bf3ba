"""What a session computes equals the plain model, however its tokens are sent."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from raw_client import BLOCKS, HIDDEN, TOLERANCE, Peer, Whole, difference, service_of, serving, wait_until

from lilliput import Server
from lilliput.errors import BadRequest, CacheFull, TooLong
from lilliput.wire import lilliput_pb2 as pb

pytestmark = pytest.mark.usefixtures("nothing_left")


def test_a_prefix_then_one_token_then_many(peer: Peer) -> None:
    session = peer.session()
    for tokens in (37, 1, 1, 20, 1, 64, 1):  # past several pages of 32
        body = session.go_on(tokens)
        assert body.computed_tokens == tokens
        assert body.max_length == 256
        assert body.queued_ms >= 0
        assert body.compute_ms > 0
    session.bye()


def test_a_step_after_a_prefix_of_100_computes_one_token(server: Server, peer: Peer) -> None:
    counters = service_of(server).engine.counters
    session = peer.session()
    session.go_on(100)
    tokens, steps = counters.tokens, counters.steps
    for _ in range(5):
        assert session.go_on().computed_tokens == 1
    assert counters.tokens - tokens == 5
    assert counters.steps - steps == 5
    session.bye()


@pytest.mark.parametrize(("start", "end"), [(0, 1), (2, 5), (5, 6), (0, 6)])
def test_any_part_of_the_span(peer: Peer, start: int, end: int) -> None:
    session = peer.session(start, end, rows=2)
    for tokens in (40, 1, 7, 1):
        session.go_on(tokens, rows=2)
    session.bye()


def test_sessions_over_different_parts_at_the_same_time(peer: Peer, stranger: Peer) -> None:
    sessions = [peer.session(0, 3), stranger.session(2, 6), peer.session(0, 6), stranger.session(4, 5)]
    inputs = [[torch.randn(1, tokens, HIDDEN) for tokens in (35, 1, 1, 5)] for _ in sessions]
    for session, parts in zip(sessions, inputs, strict=True):
        for hidden in parts:
            session.submit(hidden)
    for session, parts in zip(sessions, inputs, strict=True):
        outputs = torch.cat([session.output()[1] for _ in parts], dim=1)
        assert difference(outputs, session.whole(torch.cat(parts, dim=1), session.start, session.end)) < TOLERANCE
        session.bye()


def test_a_chain_of_sessions_equals_the_whole_model(peer: Peer, whole: Whole) -> None:
    chain = [peer.session(start, start + 2) for start in (0, 2, 4)]
    inputs = torch.randn(1, 50, HIDDEN)
    outputs = []
    for part in inputs.split([40, 1, 1, 8], dim=1):
        for session in chain:
            part = session.step(part)[1]
        outputs.append(part)
    assert difference(torch.cat(outputs, dim=1), whole(inputs)) < TOLERANCE
    for session in chain:
        session.bye()


def test_many_rows(peer: Peer) -> None:
    session = peer.session(rows=9, max_length=64)
    for tokens in (30, 1, 4, 1):
        session.go_on(tokens, rows=9)
    session.bye()


def test_fewer_rows_than_asked_for(peer: Peer) -> None:
    session = peer.session(rows=4, max_length=64)
    session.go_on(5, rows=2)
    session.go_on(1)
    session.bye()


# ---- masks, positions, prompts ----


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("per_row", [False, True])
def test_masks(peer: Peer, whole: Whole, rows: int, per_row: bool) -> None:
    """A mask over the prefix (looking ahead, too), then over one token, then over several."""
    mask = torch.rand(rows if per_row else 1, 45, 45) > 0.4
    mask |= torch.eye(45, dtype=torch.bool)
    mask[:, :37, 37:] = False
    mask[:, 37:] &= torch.ones(45, 45, dtype=torch.bool).tril()[37:]
    inputs = torch.randn(rows, 45, HIDDEN)
    session = peer.session(rows=rows)
    outputs = []
    for start, end in ((0, 37), (37, 38), (38, 44), (44, 45)):
        outputs.append(session.step(inputs[:, start:end], mask=mask[:, start:end, :end])[1])
    assert difference(torch.cat(outputs, dim=1), whole(inputs, mask=mask)) < TOLERANCE
    session.bye()


def test_a_mask_without_rows(peer: Peer, whole: Whole) -> None:
    """[prefix, prefix] and [tokens, length], as the design has them."""
    mask = torch.ones(12, 12, dtype=torch.bool).tril()
    mask[5:, 2] = False
    inputs = torch.randn(2, 12, HIDDEN)
    session = peer.session(rows=2)
    outputs = [session.step(inputs[:, a:b], mask=mask[a:b, :b])[1] for a, b in ((0, 8), (8, 9), (9, 12))]
    assert difference(torch.cat(outputs, dim=1), whole(inputs, mask=mask[None])) < TOLERANCE
    session.bye()


def test_a_mask_in_one_step_only(peer: Peer, whole: Whole) -> None:
    """Padding on the left, as a batch of unequal prompts has it; positions count from the first real token."""
    padding = torch.tensor([0, 4])
    inputs = torch.randn(2, 12, HIDDEN)
    allowed = torch.arange(12) >= padding[:, None]
    mask = torch.ones(12, 12, dtype=torch.bool).tril() & allowed[:, None]
    positions = (torch.arange(12) - padding[:, None]).clamp(min=0)
    session = peer.session(rows=2)
    outputs = [
        session.step(inputs[:, a:b], mask=mask[:, a:b, :b], position_ids=positions[:, a:b])[1]
        for a, b in ((0, 9), (9, 10), (10, 12))
    ]
    expected = whole(inputs, mask=mask | torch.eye(12, dtype=torch.bool), position_ids=positions)
    got = torch.cat(outputs, dim=1)
    assert torch.isfinite(got).all()
    for row, start in enumerate(padding.tolist()):
        assert difference(got[row, start:], expected[row, start:]) < TOLERANCE
    session.bye()


def test_a_mask_that_allows_nothing_at_all(peer: Peer) -> None:
    session = peer.session()
    for tokens in (6, 1):
        mask = torch.zeros(1, tokens, session.length + tokens, dtype=torch.bool)
        hidden = torch.randn(1, tokens, HIDDEN)
        _, output = session.step(hidden, mask=mask)
        session.remember(hidden)
        assert torch.isfinite(output).all()
    session.go_on(3, start_position=0)
    session.bye()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_position_ids(peer: Peer, whole: Whole, dtype: torch.dtype) -> None:
    positions = torch.stack([torch.arange(20) + 5, torch.arange(20) * 3]).to(dtype)
    inputs = torch.randn(2, 20, HIDDEN)
    session = peer.session(rows=2)
    outputs = [
        session.step(inputs[:, a:b], position_ids=positions[:, a:b])[1] for a, b in ((0, 13), (13, 14), (14, 20))
    ]
    assert difference(torch.cat(outputs, dim=1), whole(inputs, position_ids=positions.long())) < TOLERANCE
    session.bye()


@pytest.mark.parametrize("codec", ["none", "float16"])
def test_prompts_are_added_to_the_inputs_of_every_block(peer: Peer, whole: Whole, codec: str) -> None:
    inputs, prompts = torch.randn(2, 30, HIDDEN), torch.randn(3, 2, 30, HIDDEN) * 0.3
    # many and of one sign: their sum is past what float16 holds, each of them is not
    prompts[:, :, :20] = prompts[:, :, :20].abs() * 100
    if codec == "float16":
        inputs, prompts = inputs.half().float(), prompts.half().float()
    session = peer.session(1, 4, rows=2)
    outputs = [
        session.step(inputs[:, a:b], prompts=prompts[:, :, a:b], codec=codec)[1]
        for a, b in ((0, 25), (25, 26), (26, 30))
    ]
    assert difference(torch.cat(outputs, dim=1), whole(inputs, 1, 4, prompts=prompts)) < TOLERANCE
    session.bye()


# ---- going back, reordering ----


def test_rollback(peer: Peer) -> None:
    session = peer.session()
    session.go_on(50)
    for position, tokens in ((45, 1), (46, 1), (32, 9), (41, 1), (40, 30), (0, 3), (3, 1), (1, 1)):
        session.go_on(tokens, start_position=position)
    session.bye()


def test_rollback_frees_pages(server: Server, peer: Peer) -> None:
    pool = service_of(server).engine.pool
    session = peer.session()
    session.go_on(200)
    assert pool.used == 7
    session.go_on(1, start_position=40)
    assert pool.used == 2
    session.bye()


def test_after_a_rollback_to_nothing_there_may_be_other_rows(peer: Peer) -> None:
    session = peer.session(rows=4, max_length=64)
    session.go_on(40, rows=2)
    session.go_on(40, rows=4, start_position=0)
    session.go_on(1)
    session.bye()


def test_parents(server: Server, peer: Peer) -> None:
    """One row becomes four, four are shuffled, doubled, dropped."""
    session = peer.session(rows=4, max_length=128)
    session.go_on(40, rows=1)
    session.go_on(1, parents=[0, 0, 0, 0])
    for parents in ([3, 1, 0, 2], [0, 0, 1, 1], [2], [0, 0], [1, 0, 1]):
        session.go_on(1, parents=parents)
        session.go_on(3)
    session.go_on(30, parents=[2, 0, 2])
    session.go_on(2, parents=[1, 1, 1, 0], start_position=41)
    session.bye()


def test_rows_that_share_a_prefix_share_its_pages(server: Server, peer: Peer) -> None:
    pool = service_of(server).engine.pool
    session = peer.session(rows=8, max_length=128)
    session.go_on(96, rows=1)
    assert pool.used == 3
    session.go_on(1, parents=[0] * 8)
    assert pool.used == 3 + 8
    session.go_on(1, parents=[0] * 8)  # seven of eight are forgotten
    assert pool.used == 3 + 8
    session.go_on(1, parents=[5])
    assert pool.used == 3 + 1
    session.bye()


# ---- ids ----


def test_a_repeated_step_is_answered_from_memory(server: Server, peer: Peer) -> None:
    counters = service_of(server).engine.counters
    session = peer.session()
    session.go_on(10)
    hidden = torch.randn(1, 1, HIDDEN)
    body, first = session.step(hidden, step_id=77)
    computed = counters.tokens
    again, second = session.step(hidden, step_id=77)
    assert torch.equal(first, second)
    assert again.length == body.length == 11
    assert counters.tokens == computed
    session.remember(hidden)
    session.go_on(2)
    session.bye()


def test_a_step_repeated_while_it_is_under_way_is_computed_once(server: Server, peer: Peer) -> None:
    engine = service_of(server).engine
    session = peer.session()
    session.go_on(10)
    computed = engine.counters.tokens
    gate = threading.Event()
    engine.call(gate.wait)  # the engine is busy meanwhile
    hidden = torch.randn(1, 3, HIDDEN)
    for _ in range(3):
        session.submit(hidden, step_id=88)
    session.ping()
    gate.set()
    outputs = [session.output() for _ in range(3)]
    assert {body.step_id for body, _ in outputs} == {88}
    assert all(torch.equal(output, outputs[0][1]) for _, output in outputs)
    assert engine.counters.tokens == computed + 3
    session.remember(hidden)
    session.go_on()
    session.bye()


def test_a_step_repeated_too_late_is_not_computed_again(server: Server, peer: Peer) -> None:
    counters = service_of(server).engine.counters
    session = peer.session()
    hidden = torch.randn(1, 2, HIDDEN)
    session.step(hidden, step_id=5)
    session.remember(hidden)
    session.go_on(step_id=6)
    computed = counters.tokens
    assert isinstance(session.refused(hidden, step_id=5), BadRequest)
    assert counters.tokens == computed
    session.go_on(step_id=7)
    session.bye()


def test_a_refused_step_may_come_again_under_its_id(peer: Peer) -> None:
    session = peer.session()
    session.refused(torch.randn(1, 2, HIDDEN + 1), step_id=5)
    session.go_on(2, step_id=5)
    session.bye()


def test_steps_without_ids_are_all_computed(peer: Peer) -> None:
    session = peer.session()
    for tokens in (3, 1, 1):
        session.go_on(tokens, step_id=0)
    session.bye()


def test_steps_may_be_sent_ahead(peer: Peer, whole: Whole) -> None:
    inputs = torch.randn(1, 60, HIDDEN)
    session = peer.session()
    parts = inputs.split([30] + [1] * 30, dim=1)
    ids = [session.submit(part) for part in parts]
    answers = [session.output() for _ in parts]
    assert [body.step_id for body, _ in answers] == ids
    assert [body.length for body, _ in answers] == list(range(30, 61))
    assert difference(torch.cat([output for _, output in answers], dim=1), whole(inputs)) < TOLERANCE
    session.bye()


# ---- lengths ----


def test_past_max_length_is_refused_and_the_session_goes_on(peer: Peer) -> None:
    session = peer.session(max_length=40)
    session.go_on(38)
    refusal = session.refused(torch.randn(1, 3, HIDDEN))
    assert isinstance(refusal, TooLong)
    assert "40" in str(refusal)
    session.go_on(2)
    assert isinstance(session.refused(torch.randn(1, 1, HIDDEN)), TooLong)
    session.go_on(5, start_position=30)
    session.bye()


def test_a_session_may_become_longer(server: Server, peer: Peer) -> None:
    admission = service_of(server).admission
    session = peer.session(max_length=40, rows=2)
    session.go_on(40, rows=2)
    assert admission.promised == 4
    assert session.go_on(10, max_length=70).max_length == 70
    assert admission.promised == 6
    session.go_on(20)
    assert isinstance(session.refused(torch.randn(2, 1, HIDDEN)), TooLong)
    refusal = session.refused(torch.randn(2, 1, HIDDEN), max_length=4000)
    assert isinstance(refusal, TooLong)
    assert "2048" in str(refusal)
    session.bye()


def test_a_session_may_not_become_longer_than_there_is_room(server: Server, peer: Peer, stranger: Peer) -> None:
    large = stranger.session(rows=3, max_length=2048)
    session = peer.session(rows=2, max_length=64)
    session.go_on(10, rows=2)
    assert isinstance(session.refused(torch.randn(2, 1, HIDDEN), max_length=2048), CacheFull)
    session.go_on(1)
    large.bye()
    wait_until(lambda: service_of(server).admission.running == 1)
    session.go_on(1, max_length=2048)
    session.bye()


def test_a_prefix_longer_than_one_step_takes_comes_in_several(peer: Peer) -> None:
    session = peer.session(max_length=1100)
    refusal = session.refused(torch.randn(1, 1025, HIDDEN))
    assert isinstance(refusal, BadRequest)
    assert "1024" in str(refusal)
    session.go_on(1024)
    session.go_on(70)
    session.bye()


# ---- codecs ----


@pytest.mark.parametrize(
    ("codec", "tolerance"), [("none", 1e-4), ("float16", 2e-3), ("bfloat16", 1e-2), ("int8", 2e-2)]
)
def test_codecs_both_ways(peer: Peer, whole: Whole, codec: str, tolerance: float) -> None:
    """What arrives is rounded by the codec and nothing else: the reference gets the rounded inputs."""
    from lilliput.wire.tensors import decode, encode

    session = peer.session(codec=codec)
    inputs, outputs = [], []
    for tokens in (33, 1, 5):
        hidden = torch.randn(1, tokens, HIDDEN)
        header, parts = encode("hidden", hidden, codec)
        inputs.append(decode(header, b"".join(parts)).float())
        output = session.step(hidden, codec=codec)[1]
        assert output.dtype == {"none": torch.float32, "int8": torch.float32}.get(codec, getattr(torch, codec, None))
        outputs.append(output.float())
    assert difference(torch.cat(outputs, dim=1), whole(torch.cat(inputs, dim=1))) < tolerance
    session.bye()


def test_a_codec_makes_messages_smaller(peer: Peer) -> None:
    sizes = {}
    for codec in ("none", "float16", "int8"):
        session = peer.session(codec=codec)
        session.submit(torch.randn(1, 10, HIDDEN))
        length = int.from_bytes(session.thread.run(session.channel._reader.readexactly(4)), "big")
        header = pb.Message.FromString(session.thread.run(session.channel._reader.readexactly(length)))
        sizes[codec] = header.tensors[0].nbytes
        session.thread.run(session.channel._reader.readexactly(sizes[codec]))
        session.bye()
    assert sizes == {"none": 10 * HIDDEN * 4, "float16": 10 * HIDDEN * 2, "int8": 10 * (HIDDEN + 4)}


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 5e-2), ("float16", 1e-2)])
def test_servers_that_compute_in_fewer_bits(tiny_llama: Path, whole: Whole, dtype: str, tolerance: float) -> None:
    with serving(tiny_llama, (0, 2), dtype=dtype, cache_tokens=1024) as server:
        peer = Peer(server, whole)
        session = peer.session(0, 2)
        inputs = torch.randn(1, 50, HIDDEN)
        outputs = [session.step(part)[1] for part in inputs.split([40, 1, 9], dim=1)]
        assert {output.dtype for output in outputs} == {getattr(torch, dtype)}
        assert difference(torch.cat(outputs, dim=1), whole(inputs, 0, 2)) < tolerance
        refusal = session.refused(torch.full((1, 1, HIDDEN), 3.4e38))  # float32 holds it
        assert isinstance(refusal, BadRequest)
        assert dtype in str(refusal)
        session.step(inputs[:, :1])
        session.bye()
        peer.stop()


# ---- several sessions on one stream ----


def test_sessions_on_one_stream_are_told_apart_and_end_one_by_one(server: Server, peer: Peer, whole: Whole) -> None:
    stream = peer.stream()
    numbers = (3, 1, 99)
    inputs = {number: torch.randn(1, 12, HIDDEN) for number in numbers}
    for number in numbers:
        stream.send(pb.Message(open=pb.Open(start=0, end=BLOCKS, rows=1, max_length=64), session=number))
    accepted = [stream.receive() for _ in numbers]
    assert {r.session for r in accepted if r is not None and r.kind == "info"} == set(numbers)
    for number in numbers:
        stream.send(pb.Message(step=pb.Step(step_id=4), session=number), {"hidden": inputs[number][:, :11]})
    for _ in numbers:
        received = stream.receive()
        assert received is not None
        assert difference(received.tensors["hidden"], whole(inputs[received.session][:, :11])) < TOLERANCE
    # one errs, one is closed, one is left
    stream.send(pb.Message(step=pb.Step(step_id=5), session=3), {"hidden": torch.full((1, 1, HIDDEN), torch.nan)})
    received = stream.receive()
    assert received is not None
    assert (received.kind, received.session) == ("error", 3)
    stream.send(pb.Message(close=pb.Close(), session=1))
    stream.send(pb.Message(step=pb.Step(step_id=5), session=1), {"hidden": torch.randn(1, 1, HIDDEN)})
    received = stream.receive()
    assert received is not None
    assert (received.kind, received.session) == ("error", 1)
    for number in (3, 99):
        stream.send(pb.Message(step=pb.Step(step_id=6), session=number), {"hidden": inputs[number][:, 11:]})
        received = stream.receive()
        assert received is not None
        assert received.session == number
        assert difference(received.tensors["hidden"], whole(inputs[number])[:, 11:]) < TOLERANCE
    # one that cannot be opened disturbs nobody either
    stream.send(pb.Message(open=pb.Open(start=0, end=77, rows=1, max_length=8), session=1))
    received = stream.receive()
    assert received is not None
    assert (received.kind, received.session) == ("error", 1)
    assert received.body.closed  # type: ignore[attr-defined]
    stream.send(pb.Message(open=pb.Open(start=0, end=1, rows=1, max_length=8), session=1))  # the number is free again
    received = stream.receive()
    assert received is not None
    assert (received.kind, received.session) == ("info", 1)
    stream.close()
