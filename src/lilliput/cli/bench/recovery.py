"""How long the gap is when a server is killed in the middle of an answer."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch

from lilliput.cli.bench.report import Figure
from lilliput.cli.local_swarm import LocalSwarm
from lilliput.cli.nursery import Nursery
from lilliput.client.model import AutoDistributedModelForCausalLM

HISTORIES = (128, 1024, 4096)
_STEPS_BEFORE = 3


def recovery(model: str, blocks: int, dtype: str, codec: str, rounds: int) -> list[Figure]:
    """Milliseconds from `kill -9` of the middle one of three servers to the next token's hidden states, beyond a usual
    step; by tokens of history, and by whether the server that takes over has them in its cache."""
    third = blocks // 3
    spans = [(0, third), (third, 2 * third), (2 * third, blocks), (third, 2 * third)]
    figures = []
    options = ["--dtype", dtype, "--cache-tokens", str(8 * max(HISTORIES))]
    with Nursery() as nursery, LocalSwarm(model, spans, options=options, nursery=nursery) as swarm:
        distributed = AutoDistributedModelForCausalLM.from_pretrained(
            model, initial_peers=swarm.initial_peers, dtype=dtype, codec=codec
        )
        try:
            for history in HISTORIES:
                for cached in (False, True):
                    name = f"recovery after {history:,} tokens"
                    note = "the prefix cached at the new server" if cached else ""
                    figure = Figure(f"{name}, cached" if cached else name, "ms", note=note)
                    for _ in range(rounds):
                        figure.values.append(_gap(distributed, swarm, spans[1], history, cached))
                    figures.append(figure)
        finally:
            distributed.close()
    return figures


def _gap(model: Any, swarm: LocalSwarm, middle: tuple[int, int], history: int, cached: bool) -> float:
    width = model.config.hidden_size
    ids = torch.randint(100, 1000, (1, history + 2 * _STEPS_BEFORE))
    hidden = torch.randn(1, ids.shape[1], width, dtype=model.dtype)
    servers = {s.peer_id: s for s in swarm.servers if s.blocks == middle and s.process.poll() is None}
    used: set[str] = set()
    while cached and len(used) < len(servers):  # every one of them sees the prefix once
        for peer in used:
            model._shared.connection.ban(peer)
        with model.inference_session(max_length=history + 16) as session:
            session.step(hidden[:, :history], tokens=ids[:, :history], needed=1)
            used.add(session.hops[1].peer_id)
    with model.inference_session(max_length=history + 16) as session:
        session.step(hidden[:, :history], tokens=ids[:, :history], needed=1)
        usual = []
        for at in range(history, history + _STEPS_BEFORE):
            begun = time.perf_counter()
            session.step(hidden[:, at : at + 1], tokens=ids[:, at : at + 1])
            usual.append(time.perf_counter() - begun)
        victim = servers[session.hops[1].peer_id]
        begun = time.perf_counter()
        os.kill(victim.pid, signal.SIGKILL)
        at = history + _STEPS_BEFORE
        session.step(hidden[:, at : at + 1], tokens=ids[:, at : at + 1])
        gap = time.perf_counter() - begun - min(usual)
        assert len(session.recoveries) == 1
    swarm.add(middle)
    return gap * 1e3
