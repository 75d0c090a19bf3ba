"""How likely the model finds tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Likelihood:
    """Of a token where it stands, by the model itself: before penalties, temperature and grammar."""

    token: int
    logprob: float
    #: the likeliest tokens with theirs, the likeliest first
    top: list[tuple[int, float]]


def likelihoods(logits: torch.Tensor, tokens: Sequence[int], top: int) -> list[Likelihood]:
    """Those of `tokens`, with so many of the likeliest in their places.

    :param logits: float32 `[tokens, vocabulary]`
    """
    totals = logits.logsumexp(1, keepdim=True)
    own = logits.gather(1, torch.tensor(tokens)[:, None]) - totals
    best = logits.topk(top)
    # the same subtraction for both: programs compare a token's with the likeliest to see whether it is that
    rows = zip(tokens, own[:, 0].tolist(), best.indices.tolist(), (best.values - totals).tolist(), strict=True)
    return [Likelihood(token, logprob, list(zip(ids, values, strict=True))) for token, logprob, ids, values in rows]
