"""Real servers behind an emulated network: ways that are long, slow, cut, or silent, and a nearer server that joins."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from lilliput import AutoDistributedModelForCausalLM
from lilliput.cli.bench.network import Link, Network
from lilliput.cli.local_swarm import LocalSwarm
from lilliput.cli.nursery import Nursery
from lilliput.client import connection
from lilliput.client.connection import Patience

GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
PROMPT = torch.arange(5, 45)[None]
SPANS = [(0, 3), (3, 6)]


class Until(StoppingCriteria):
    """Ends an answer when something has happened; told the number of every token."""

    def __init__(self, happened: Callable[[int], bool]) -> None:
        self.happened, self.calls = happened, 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.calls += 1
        return torch.full((len(input_ids),), self.happened(self.calls))


@pytest.fixture
def network() -> Iterator[Network]:
    with Network() as network:
        yield network


@pytest.fixture
def links(network: Network) -> list[Link]:
    return [network.link() for _ in SPANS]


@pytest.fixture
def swarm(tiny_llama: Path, nursery: Nursery, links: list[Link]) -> Iterator[LocalSwarm]:
    """Servers behind links; those that join later are near."""
    with LocalSwarm(str(tiny_llama), SPANS, options=["--dtype", "float32"], links=links, nursery=nursery) as swarm:
        yield swarm


@pytest.fixture
def connect(swarm: LocalSwarm, tiny_llama: Path) -> Iterator[Callable[..., Any]]:
    models = []

    def connect(patience: Patience) -> Any:
        models.append(
            AutoDistributedModelForCausalLM.from_pretrained(
                str(tiny_llama), initial_peers=swarm.initial_peers, dtype="float32", patience=patience
            )
        )
        return models[-1]

    yield connect
    for model in models:
        model.close()


def answer(model: Any, session: Any, happened: Callable[[int], bool], most: int = 1500) -> torch.Tensor:
    """As many tokens as it takes until something has happened."""
    until = StoppingCriteriaList([Until(happened)])
    with session:
        found: torch.Tensor = model.generate(PROMPT, max_new_tokens=most, stopping_criteria=until, **GREEDY)
    return found


def assert_same(found: torch.Tensor, whole: Any) -> None:
    new = found.shape[1] - PROMPT.shape[1]
    assert found.tolist() == whole.generate(PROMPT, max_new_tokens=new, **GREEDY).tolist()


def test_a_session_moves_once_to_a_nearer_server(
    swarm: LocalSwarm, links: list[Link], connect: Any, whole: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "FRESH_SECONDS", 0.5)
    for link in links:
        link.delay = 0.03
    model = connect(Patience(look_around=0.5))
    session = model.inference_session(max_length=2000)
    moved_at: list[float] = []

    def happened(calls: int) -> bool:
        if calls == 5:
            swarm.start([(0, 6)])
        if session.recoveries and not moved_at:
            moved_at.append(time.monotonic())
        # it looks around after that, too, and stays
        return bool(moved_at) and time.monotonic() > moved_at[0] + 3.0

    found = answer(model, session, happened)
    (move,) = session.recoveries
    assert (move.moved, move.start, move.end) == (True, 0, 6)
    assert move.new_peer_ids == (swarm.servers[-1].peer_id,)
    assert "a token is expected to take" in move.why
    assert move.waited_tokens <= 2
    assert_same(found, whole)


@pytest.mark.parametrize("silent", [False, True])
def test_a_way_breaks_inside_a_step(
    silent: bool, swarm: LocalSwarm, network: Network, links: list[Link], connect: Any, whole: Any
) -> None:
    """As when a cable is pulled, or when a machine dies that cannot say so: only missing answers to pings tell."""
    links[1].delay = 0.02
    model = connect(Patience(silence=2.0, look_around=math.inf))
    session = model.inference_session(max_length=100)

    def happened(calls: int) -> bool:
        if calls == 4:
            swarm.start([(3, 6)])
        if calls == 6:
            fate = network.stall if silent else network.cut
            threading.Timer(0.01, fate, [links[1]]).start()  # the step that follows is under way then
        return calls == 16

    found = answer(model, session, happened)
    (recovery,) = session.recoveries
    assert recovery.peer_id == swarm.servers[1].peer_id
    assert ("no sign of life" if silent else "connection") in recovery.why
    assert_same(found, whole)


def test_a_slow_way_is_no_silence(swarm: LocalSwarm, links: list[Link], connect: Any, whole: Any) -> None:
    """Signs of life come after what is on its way already."""
    model = connect(Patience(silence=2.0))
    hidden = torch.randn(1, 1200, 64, generator=torch.Generator().manual_seed(1))
    with model.inference_session(max_length=1600) as session:
        session.step(hidden[:, :1])
        for link in links:
            link.bytes_per_second = 70_000
        begun = time.monotonic()
        session.step(hidden[:, 1:])
        assert time.monotonic() - begun > 3
        assert session.recoveries == []
