"""One stream over servers that are far away: what comes of it, and what the distances allow.

Computing is the servers' share of a token and this process's: the model's ends, and what `generate()` does around them.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch

from lilliput.cli.bench.network import Link, Network
from lilliput.cli.bench.report import Figure
from lilliput.cli.local_swarm import LocalSwarm
from lilliput.client.gate import Gate
from lilliput.client.model import AutoDistributedModelForCausalLM
from lilliput.client.session import InferenceSession

#: seconds, one way, from the client to each server. The servers lie on one line with it: between two of them lies the
#: difference.
_AWAY = (0.005, 0.025, 0.05)
_PROMPT_TOKENS = 16
_NEW_TOKENS = 24


def measure(model: str, blocks: int, rounds: int, *, dtype: str, codec: str) -> list[Figure]:
    """Tokens a second, measured and as the sum of all legs and the servers' own time allows."""
    edges = [blocks * i // len(_AWAY) for i in range(len(_AWAY) + 1)]
    away = ", ".join(f"{delay * 1e3:.0f}" for delay in _AWAY)
    carried = Figure("wide-area, one stream, carried", "tokens/s", note=f"servers {away} ms away, one way")
    stream = Figure("wide-area, one stream, pushed", "tokens/s", note="each server sends straight to the next")
    star = Figure("wide-area, bound over the client", "tokens/s", note="1 / (there and back to each, compute)")
    pushed = Figure("wide-area, bound if servers push", "tokens/s", note="1 / (legs of the chain, compute)")
    with (
        _links() as links,
        LocalSwarm(model, list(itertools.pairwise(edges)), options=["--dtype", dtype], links=links) as swarm,
    ):
        for push, figure, bound, trips in (
            (False, carried, star, 2 * sum(_AWAY)),
            (True, stream, pushed, 2 * _AWAY[-1]),
        ):
            distributed = AutoDistributedModelForCausalLM.from_pretrained(
                model, initial_peers=swarm.initial_peers, dtype=dtype, codec=codec, push=push
            )
            try:
                for number in range(rounds + 1):
                    took, compute = _seconds_a_token(distributed, number)
                    if number:  # the first round warms up
                        figure.values.append(1 / took)
                        bound.values.append(1 / (trips + compute))
            finally:
                distributed.close()
    return [carried, star, stream, pushed]


@contextlib.contextmanager
def _links() -> Iterator[list[Link]]:
    with Network() as network:
        links = [network.link(delay=delay) for delay in _AWAY]
        for one, other in itertools.combinations(links, 2):
            network.set_between(one, other, abs(one.delay - other.delay))
        yield links


def _seconds_a_token(model: Any, seed: int) -> tuple[float, float]:
    """Of a stream of tokens: from one to the next, and what was computed meanwhile, there and here. Medians."""
    ids = torch.randint(10, 100, (1, _PROMPT_TOKENS), generator=torch.Generator().manual_seed(seed))
    with model.inference_session(max_length=_PROMPT_TOKENS + _NEW_TOKENS) as session:
        clock = _Clock(session)
        gate = next(module for module in model.modules() if isinstance(module, Gate))
        with gate.register_forward_pre_hook(clock.leaves), gate.register_forward_hook(clock.is_back):
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=_NEW_TOKENS,
                min_new_tokens=_NEW_TOKENS,
                do_sample=False,
                streamer=clock,
            )
    steps = [
        (end - begin, computed - before + end - begin - (away - away_before))
        for (begin, before, away_before), (end, computed, away) in itertools.pairwise(clock.ticks)
    ]
    took, compute = (statistics.median(column) for column in zip(*steps, strict=True))
    return took, compute


class _Clock:
    """A transformers streamer: when each token came, how long the servers had taken by then, and how long the hidden
    states had been away from here, in seconds."""

    def __init__(self, session: InferenceSession) -> None:
        self.ticks: list[tuple[float, float, float]] = []
        self._session = session
        self._away = self._left = 0.0

    def leaves(self, *_: Any) -> None:
        self._left = time.perf_counter()

    def is_back(self, *_: Any) -> None:
        self._away += time.perf_counter() - self._left

    def put(self, value: torch.Tensor) -> None:
        if value.dim() < 2:  # else it is the prompt
            servers = sum(hop.compute_ms + hop.queued_ms for hop in self._session.stats) / 1e3
            self.ticks.append((time.perf_counter(), servers, self._away))

    def end(self) -> None:
        """Nothing more comes."""
