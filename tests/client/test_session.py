"""Sessions without a model around them, against the blocks of the whole model."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from lilliput import InferenceSession, RemoteSequential
from lilliput.cli.local_swarm import LocalSwarm
from lilliput.client import server_session
from lilliput.client.async_session import AsyncInferenceSession
from lilliput.errors import BadRequest, LilliputError, TooLong
from lilliput.server.server import Server

HIDDEN = 64


@torch.no_grad()
def blocks_of(whole: Any, hidden: torch.Tensor) -> torch.Tensor:
    """All blocks of the whole model over `hidden` `[rows, tokens, hidden]`, without embedding, norm and head."""
    kept: list[torch.Tensor] = []
    handle = whole.model.norm.register_forward_pre_hook(lambda module, args: kept.append(args[0]))
    try:
        whole.model(inputs_embeds=hidden)
    finally:
        handle.remove()
    return kept[0]


def states(rows: int, tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, tokens, HIDDEN, generator=torch.Generator().manual_seed(seed))


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-4) -> bool:
    return a.shape == b.shape and bool((a - b).abs().max() <= tolerance * b.abs().max())


def test_steps_of_any_size_equal_the_blocks(whole: Any, tiny: Any) -> None:
    hidden = states(2, 30)
    expected = blocks_of(whole, hidden)
    with tiny.inference_session(max_length=64) as session:
        parts = [session.step(part) for part in hidden.split([11, 1, 1, 7, 10], dim=1)]
        assert close(torch.cat(parts, dim=1), expected)
        assert (session.position, session.rows) == (30, 2)
        assert [hop.start for hop in session.hops] == [0, 2, 4]
        assert all(stats.computed_tokens == 60 and stats.steps == 5 for stats in session.stats)


def test_a_long_prefix_is_cut_and_its_parts_follow_one_another(whole: Any, tiny: Any) -> None:
    hidden = states(1, 1500)
    with tiny.inference_session(max_length=1600) as session:
        output = session.step(hidden)
        assert close(output, blocks_of(whole, hidden))
        assert all(stats.steps == 3 for stats in session.stats)
        assert close(session.step(states(1, 1, 5)), blocks_of(whole, torch.cat([hidden, states(1, 1, 5)], 1))[:, -1:])


def test_rollback_and_reorder(whole: Any, tiny: Any) -> None:
    first, second, third = states(3, 8), states(2, 4, 1), states(2, 5, 2)
    with tiny.inference_session(max_length=64) as session:
        session.step(first)
        session.position = 6
        rows = torch.cat([first[[2, 0], :6], second], dim=1)
        assert close(session.step(second, parents=[2, 0]), blocks_of(whole, rows)[:, 6:])
        rows = torch.cat([rows[[1, 0], :7], third], dim=1)
        session.reorder([1, 1])
        assert close(session.step(third, parents=[0, 1], start_position=7)[:1], blocks_of(whole, rows[:1])[:, 7:])
        assert session.position == 12


def test_masks_and_positions(whole: Any, tiny: Any) -> None:
    hidden = states(1, 10)
    with torch.no_grad():
        kept: list[torch.Tensor] = []
        handle = whole.model.norm.register_forward_pre_hook(lambda module, args: kept.append(args[0]))
        mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1, 1]])
        whole.model(inputs_embeds=hidden, attention_mask=mask, position_ids=torch.arange(10)[None] + 5)
        handle.remove()
    causal = torch.ones(10, 10, dtype=torch.bool).tril()
    full = ((causal & mask.bool()) | torch.eye(10, dtype=torch.bool))[None]
    positions = torch.arange(10)[None] + 5
    with tiny.inference_session(max_length=64) as session:
        first = session.step(hidden[:, :6], mask=full[:, :6, :6], position_ids=positions[:, :6])
        rest = session.step(hidden[:, 6:], mask=full[:, 6:], position_ids=positions[:, 6:])
    assert close(torch.cat([first, rest], dim=1)[:, 3:], kept[0][:, 3:])


@pytest.mark.parametrize(("codec", "tolerance"), [("none", 1e-4), ("bfloat16", 0.05), ("float16", 0.01), ("int8", 0.1)])
def test_codecs(whole: Any, tiny_swarm: LocalSwarm, tiny_llama: Any, codec: str, tolerance: float) -> None:
    from lilliput import AutoDistributedModelForCausalLM

    model = AutoDistributedModelForCausalLM.from_pretrained(
        str(tiny_llama), initial_peers=tiny_swarm.initial_peers, dtype="float32", codec=codec
    )
    hidden = states(1, 20)
    with model.inference_session(max_length=32) as session:
        assert close(session.step(hidden), blocks_of(whole, hidden), tolerance)
        sent = session.stats[0].bytes_sent
    assert sent == {"none": 4, "bfloat16": 2, "float16": 2, "int8": 1}[codec] * hidden.numel() + 80 * (codec == "int8")
    model.close()


def test_outputs_have_the_caller_s_dtype(tiny: Any) -> None:
    with tiny.inference_session(max_length=32) as session:
        assert session.step(states(1, 3).bfloat16()).dtype == torch.bfloat16
        assert session.step(states(1, 1)).dtype == torch.float32


def test_mistakes_are_told_and_leave_the_session_usable(whole: Any, tiny: Any) -> None:
    hidden = states(2, 5)
    with tiny.inference_session(max_length=16) as session:
        with pytest.raises(BadRequest, match="before the first step"):
            session.reorder([0])
        session.step(hidden)
        mistakes: list[dict[str, Any]] = [
            {"hidden_states": states(3, 1)},
            {"hidden_states": torch.randn(2, 1, HIDDEN + 1)},
            {"hidden_states": torch.full((2, 1, HIDDEN), float("nan"))},
            {"hidden_states": states(2, 1), "parents": [0, 2]},
            {"hidden_states": states(2, 1), "start_position": 6},
            {"hidden_states": states(2, 1), "mask": torch.ones(2, 1, 9, dtype=torch.bool)},
        ]
        for mistake in mistakes:
            with pytest.raises(BadRequest):
                session.step(**mistake)
        with pytest.raises(TooLong):
            session.step(states(2, 12))
        assert session.position == 5
        more = states(2, 3, 1)
        assert close(session.step(more), blocks_of(whole, torch.cat([hidden, more], 1))[:, 5:])


def test_several_sessions_at_once_do_not_mix(whole: Any, tiny: Any) -> None:
    hidden = [states(1, 12, seed) for seed in range(6)]
    outputs: dict[int, torch.Tensor] = {}

    def talk(index: int) -> None:
        with tiny.inference_session(max_length=32) as session:
            outputs[index] = torch.cat([session.step(part) for part in hidden[index].split(3, dim=1)], dim=1)

    threads = [threading.Thread(target=talk, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(close(outputs[index], blocks_of(whole, hidden[index])) for index in range(6))


def test_a_session_may_be_opened_before_its_first_step(whole: Any, tiny: Any) -> None:
    with tiny.inference_session(max_length=32, rows=2) as session:
        assert tiny._shared.run(session.core.open()) == 0
        assert close(session.step(states(1, 4)), blocks_of(whole, states(1, 4)))
        session.reorder([0, 0])
        session.step(states(2, 1))
        with pytest.raises(BadRequest, match="3 rows"):
            session.step(states(3, 1))


def test_a_closed_session_says_so(tiny: Any) -> None:
    session = tiny.inference_session(max_length=16)
    session.step(states(1, 2))
    session.close()
    session.close()
    with pytest.raises(LilliputError, match="closed"):
        session.step(states(1, 1))


def test_an_idle_session_is_kept_alive_by_pings_and_opened_anew_without(
    tiny_llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Server(
        str(tiny_llama), (0, 6), dtype="float32", cache_tokens=512, idle_seconds=1.0, first_step_seconds=1.0
    ) as server:
        blocks = RemoteSequential.from_pretrained(str(tiny_llama), initial_peers=list(server.addresses))
        core = AsyncInferenceSession(blocks.remote_model, max_length=16)
        session = InferenceSession(blocks._shared, core)
        session.step(states(1, 2))
        time.sleep(2)
        session.step(states(1, 1))
        (recovery,) = core.recoveries  # clients ping as often as servers usually ask for; this one has forgotten us
        assert "0:6" in recovery.why
        assert recovery.new_peer_ids == (recovery.peer_id,)
        session.close()
        monkeypatch.setattr(server_session, "_TICK_SECONDS", 0.1)
        monkeypatch.setattr(server_session, "_PING_SECONDS", 0.3)
        with InferenceSession(blocks._shared, AsyncInferenceSession(blocks.remote_model, max_length=16)) as session:
            session.step(states(1, 2))
            time.sleep(2)
            session.step(states(1, 1))
        blocks.close()
