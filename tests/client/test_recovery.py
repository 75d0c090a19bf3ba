"""Servers are killed and frozen; whoever talks through them gets the same tokens as if nothing had happened."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList

from lilliput import AutoDistributedModelForCausalLM
from lilliput.cli.local_swarm import LocalServer, LocalSwarm
from lilliput.client.connection import Patience

NEW = 12
GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "max_new_tokens": NEW}
PROMPT = torch.arange(5, 45)[None]


class At(LogitsProcessor):
    """Does something between two steps: before the token with this number is chosen."""

    def __init__(self, actions: dict[int, Callable[[], None]]) -> None:
        self.actions, self.calls = dict(actions), 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        action = self.actions.pop(self.calls, None)
        if action is not None:
            action()
        return scores


@pytest.fixture
def push() -> bool:
    """Whether servers push to one another; tests that try both name it in a mark."""
    return True


@pytest.fixture
def model(swarm: LocalSwarm, tiny_llama: Path, push: bool) -> Iterator[Any]:
    model = AutoDistributedModelForCausalLM.from_pretrained(
        str(tiny_llama), initial_peers=swarm.initial_peers, dtype="float32", patience=Patience(silence=1.0), push=push
    )
    yield model
    model.close()


def kill(server: LocalServer, signum: int = signal.SIGKILL) -> None:
    os.kill(server.pid, signum)


def same(
    model: Any, whole: Any, actions: dict[int, Callable[[], None]], ids: torch.Tensor = PROMPT, **options: Any
) -> Any:
    """generate() with the actions equals the whole model's; returns the session's recoveries."""
    options = {**GREEDY, **options}
    rows = ids.shape[0] * max(options.get("num_beams", 1), options.get("num_return_sequences", 1))
    torch.manual_seed(7)
    expected = whole.generate(ids, **options)
    torch.manual_seed(7)
    with model.inference_session(max_length=ids.shape[1] + NEW + 32, rows=rows) as session:
        at = At(actions)
        answer = model.generate(ids, logits_processor=LogitsProcessorList([at]), **options)
        assert not at.actions
        assert answer.tolist() == expected.tolist()
        return list(session.core.recoveries)


REPLACEMENTS = {"one": [(2, 4)], "two": [(2, 3), (3, 4)], "wider": [(1, 3), (3, 6)], "all": [(0, 6)]}


@pytest.mark.parametrize("spans", REPLACEMENTS.values(), ids=REPLACEMENTS)
def test_a_server_dies_between_two_steps(spans: Any, swarm: LocalSwarm, model: Any, whole: Any) -> None:
    swarm.start(spans)
    # those that hold more blocks may be in the chain from the start: kill whoever is in the middle of it
    by_peer = {server.peer_id: server for server in swarm.servers}
    session = model.inference_session(max_length=64)
    with session:
        expected = whole.generate(PROMPT, **GREEDY)
        first = model.generate(PROMPT, **{**GREEDY, "max_new_tokens": 5})
        victim = session.hops[len(session.hops) // 2]
        kill(by_peer[victim.peer_id])
        answer = model.generate(first, **{**GREEDY, "max_new_tokens": NEW - 5})
        assert answer.tolist() == expected.tolist()
        assert [recovery.peer_id for recovery in session.core.recoveries] == [victim.peer_id]


def test_before_the_first_step_and_after_it(swarm: LocalSwarm, model: Any, whole: Any) -> None:
    swarm.start([(0, 2)])
    kill(swarm.servers[0])
    same(model, whole, {})
    swarm.start([(4, 6)])
    assert len(same(model, whole, {1: lambda: kill(swarm.servers[2])})) == 1


def test_its_replacement_dies_too_and_then_two_at_once(swarm: LocalSwarm, model: Any, whole: Any) -> None:
    swarm.start([(2, 4), (2, 4), (0, 6)])

    def everyone_of(block: int) -> None:
        for server in swarm.servers:
            if server.blocks == (block, block + 2) and server.process.poll() is None:
                kill(server)

    def two() -> None:
        everyone_of(0)
        everyone_of(4)

    recoveries = same(model, whole, {3: lambda: kill(swarm.servers[1]), 6: lambda: everyone_of(2), 9: two})
    assert recoveries


def test_nobody_is_there_at_first_and_then_somebody_is(swarm: LocalSwarm, model: Any, whole: Any) -> None:
    def kill_and_start() -> None:
        kill(swarm.servers[1])
        threading.Timer(1.0, lambda: swarm.start([(2, 4)])).start()

    (recovery,) = same(model, whole, {4: kill_and_start})
    assert recovery.seconds > 0.5
    assert recovery.replayed_tokens == PROMPT.shape[1] + 3


def test_a_frozen_server_is_passed_over(swarm: LocalSwarm, model: Any, whole: Any) -> None:
    swarm.start([(2, 4)])
    try:
        chain_of_two = same(model, whole, {4: lambda: kill(swarm.servers[1], signal.SIGSTOP)})
        frozen = {recovery.peer_id for recovery in chain_of_two}
        assert frozen <= {swarm.servers[1].peer_id}
    finally:
        kill(swarm.servers[1], signal.SIGCONT)


@pytest.mark.parametrize("push", [True, False])
def test_inside_a_long_prefix(swarm: LocalSwarm, model: Any, whole: Any) -> None:
    swarm.start([(2, 4), (4, 6)])
    ids = torch.randint(5, 250, (1, 1900), generator=torch.Generator().manual_seed(1))
    expected = whole.generate(ids, **GREEDY)
    for victim, delay in ((1, 0.05), (2, 0.15)):
        timer = threading.Timer(delay, kill, [swarm.servers[victim]])
        timer.start()
        with model.inference_session(max_length=2000) as session:
            assert model.generate(ids, **GREEDY).tolist() == expected.tolist()
            print(session.core.recoveries)
        timer.join()


@pytest.mark.parametrize("push", [True, False])
def test_beams(swarm: LocalSwarm, model: Any, whole: Any) -> None:
    actions: dict[int, Callable[[], None]] = {
        2: lambda: swarm.start([(2, 3), (3, 4)]) and None,  # not before: they might be chosen at once
        6: lambda: kill(swarm.servers[1]),
    }
    recoveries = same(model, whole, actions, num_beams=4)
    assert len(recoveries) == 1


def test_a_batch_of_unequal_prompts_and_seeded_sampling(swarm: LocalSwarm, model: Any, whole: Any) -> None:
    swarm.start([(4, 6), (0, 2)])
    ids = torch.randint(5, 250, (3, 20), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    for row, padding in enumerate((0, 7, 3)):
        ids[row, :padding], mask[row, :padding] = 0, 0
    kills = {3: lambda: kill(swarm.servers[2])}
    assert len(same(model, whole, kills, ids, attention_mask=mask)) <= 1
    kills = {5: lambda: kill(swarm.servers[0])}
    same(model, whole, kills, ids, attention_mask=mask, do_sample=True, top_k=20, temperature=1.5)


def test_assisted_generation(swarm: LocalSwarm, model: Any, whole: Any, tiny_llama: Path) -> None:
    swarm.start([(2, 4)])
    assistant = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    with torch.no_grad():  # wrong now and then, so that something is rolled back
        assistant.lm_head.weight += 0.05 * torch.randn(assistant.lm_head.weight.shape)
    expected = whole.generate(PROMPT, **GREEDY)
    at = At({4: lambda: kill(swarm.servers[1])})
    answer = model.generate(PROMPT, assistant_model=assistant, logits_processor=LogitsProcessorList([at]), **GREEDY)
    assert answer.tolist() == expected.tolist()


def test_after_a_rollback(swarm: LocalSwarm, model: Any, whole: Any) -> None:
    swarm.start([(0, 2), (2, 4), (4, 6)])
    expected = whole.generate(PROMPT, **GREEDY)
    with model.inference_session(max_length=100) as session:
        answer = model.generate(PROMPT, **GREEDY)
        for victim in (0, 1, 2):
            session.position -= 5
            kill(swarm.servers[victim])
            answer = model.generate(answer[:, :-6], **{**GREEDY, "max_new_tokens": 6})
            assert answer.tolist() == expected.tolist()


@pytest.mark.parametrize("padded", [False, True])
def test_when_the_client_has_kept_nothing_between_servers(
    padded: bool, swarm: LocalSwarm, tiny_llama: Path, whole: Any
) -> None:
    """The servers that live make again what the lost one was sent."""
    swarm.start([(4, 5), (5, 6), (2, 4)])
    model = AutoDistributedModelForCausalLM.from_pretrained(
        str(tiny_llama), initial_peers=swarm.initial_peers, dtype="float32", replay_bytes=0, push=False
    )
    ids = torch.randint(5, 250, (2, 30), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    if padded:
        ids[0, :9], mask[0, :9] = 0, 0
    try:
        same(
            model,
            whole,
            {4: lambda: kill(swarm.servers[2]), 8: lambda: kill(swarm.servers[1])},
            ids,
            attention_mask=mask,
        )
    finally:
        model.close()


def test_gradients_do_not_change(swarm: LocalSwarm, model: Any) -> None:
    swarm.start([(0, 3), (2, 4), (4, 6)])
    hidden = torch.randn(4, 300, 64, generator=torch.Generator().manual_seed(3))

    def gradients(delay: float | None, victim: int = 0) -> torch.Tensor:
        inputs = hidden.clone().requires_grad_()
        output = model.remote(inputs)
        if delay is not None:
            threading.Timer(delay, kill, [swarm.servers[victim]]).start()
        output.square().sum().backward()
        time.sleep(delay or 0)
        assert inputs.grad is not None
        return inputs.grad

    expected = gradients(None)
    for victim, delay in ((2, 0.0), (1, 0.03)):
        found = gradients(delay, victim)
        assert torch.allclose(found, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("beams", [1, 3])
def test_sessions_move_before_a_server_leaves(beams: int, swarm: LocalSwarm, model: Any, whole: Any) -> None:
    """The pause is a step, not a replay, and the server goes as soon as they have moved."""
    swarm.start([(2, 3), (3, 4)])
    leaver = swarm.servers[1]

    def leave_in_time() -> None:
        kill(leaver, signal.SIGTERM)
        time.sleep(0.5)

    recoveries = same(model, whole, {4: leave_in_time, 6: lambda: time.sleep(0.2)}, num_beams=beams)
    leaver.process.wait(20)
    assert [(r.moved, r.peer_id, len(r.new_peer_ids)) for r in recoveries] == [(True, leaver.peer_id, 2)]
    assert recoveries[0].replayed_tokens >= PROMPT.shape[1]
    if beams == 1:  # beams may change places meanwhile, and then all is to be sent once more
        assert recoveries[0].waited_tokens <= 2


def test_a_server_leaves_though_there_is_nobody_else(swarm: LocalSwarm, model: Any, whole: Any) -> None:
    leaver = swarm.servers[1]
    with model.inference_session(max_length=64) as session:
        first = model.generate(PROMPT, **{**GREEDY, "max_new_tokens": 5})
        kill(leaver, signal.SIGTERM)
        begun = time.monotonic()
        leaver.process.wait(15)
        assert time.monotonic() - begun > 2
        swarm.start([(2, 4)])
        answer = model.generate(first, **{**GREEDY, "max_new_tokens": NEW - 5})
        assert answer.tolist() == whole.generate(PROMPT, **GREEDY).tolist()
        assert not session.core.recoveries[0].moved
