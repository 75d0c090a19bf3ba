"""Tokens are picked as transformers' own processors of logits would have it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from lilliput.gateway.sampler import Sampler, Sampling

VOCABULARY = 3000
PROMPT = [5, 9, 9, 17]


def logits(scale: float, seed: int = 0) -> torch.Tensor:
    return torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize("scale", [0.1, 2.0, 6.0])  # flat, so that most tokens count; and steep
@pytest.mark.parametrize(
    ("options", "processors"),
    [
        ({}, []),
        ({"top_p": 0.8}, [TopPLogitsWarper(0.8)]),
        ({"top_k": 7}, [TopKLogitsWarper(7)]),
        ({"top_k": 40, "top_p": 0.6}, [TopKLogitsWarper(40), TopPLogitsWarper(0.6)]),
        ({"min_p": 0.2}, [MinPLogitsWarper(0.2)]),
        ({"repetition_penalty": 1.7}, [RepetitionPenaltyLogitsProcessor(1.7)]),
    ],
)
def test_the_same_chances(scale: float, options: dict[str, Any], processors: list[Any]) -> None:
    temperature = 0.7
    before = [p for p in processors if isinstance(p, RepetitionPenaltyLogitsProcessor)]
    after = [p for p in processors if p not in before]
    chain = LogitsProcessorList([*before, TemperatureLogitsWarper(temperature), *after])
    expected = chain(torch.tensor([PROMPT]), logits(scale)[None].clone())[0].softmax(-1)
    draws = 4000
    counts: Counter[int] = Counter()
    for seed in range(draws):
        sampling = Sampling(temperature=temperature, seed=seed, **options)
        counts[Sampler(sampling, PROMPT)([], logits(scale))] += 1
    assert all(expected[token] > 0 for token in counts)
    likeliest = expected.topk(5)
    for chance, token in zip(likeliest.values.tolist(), likeliest.indices.tolist(), strict=True):
        deviation = (chance * (1 - chance) / draws) ** 0.5
        assert abs(counts[token] / draws - chance) < 5 * deviation + 1e-3


def test_penalties_count_the_answer_only() -> None:
    flat = torch.zeros(VOCABULARY)
    flat[PROMPT] = 1.0
    flat[3] = 1.5
    sampler = Sampler(Sampling(temperature=0, presence_penalty=1.0, frequency_penalty=0.25), PROMPT)
    picked = [sampler([], flat.clone()) for _ in range(5)]
    # 3 at 1.5, then at 0.25; the prompt's at 1, each then at -0.25
    assert picked == [3, 5, 9, 17, 3]


def test_a_seed_makes_it_repeatable() -> None:
    def draw(seed: int) -> list[int]:
        sampler = Sampler(Sampling(seed=seed), PROMPT)
        return [sampler([], logits(1.0, step)) for step in range(20)]

    assert draw(1) == draw(1) != draw(2)


def test_likelihoods_are_those_before_everything_else() -> None:
    sampler = Sampler(Sampling(temperature=0, logit_bias={7: 100}), PROMPT, top=2)
    assert sampler([], logits(1.0)) == 7
    noted = sampler.likelihoods.popleft()
    expected = logits(1.0).log_softmax(-1)
    assert noted.logprob == pytest.approx(expected[7].item(), abs=1e-5)
    assert [token for token, _ in noted.top] == expected.topk(2).indices.tolist()
