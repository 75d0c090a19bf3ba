"""How one stream picks its tokens.

It runs in the decoder's thread, once a token and stream, so the time counts: nothing is sorted that need not be.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from lilliput.gateway.likelihood import Likelihood

#: how many of the likeliest tokens are looked at first, when a share of the probability is to be found
_NUCLEUS_SIZES = (64, 1024)
#: below this temperature every other token's probability rounds to 0
_COLD = 1e-4


@dataclass(frozen=True)
class Sampling:
    """As in the API. Penalties for what occurs look at the answer only; the one for repetition at the prompt, too."""

    temperature: float = 1.0
    top_p: float = 1.0
    #: 0: all
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    @property
    def likeliest(self) -> bool:
        """The likeliest token is taken, by the model itself."""
        adds = self.presence_penalty or self.frequency_penalty or self.logit_bias
        return self.temperature < _COLD and self.repetition_penalty == 1.0 and not adds


class Constraint(Protocol):
    """Which tokens may come next."""

    def allowed(self, vocabulary: int) -> torch.Tensor:
        """bool [vocabulary]"""
        ...

    def advance(self, token: int) -> None: ...


class Sampler:
    """One stream's state.

    :param prompt: ids
    :param top: note the likelihood of every token that is picked, and so many of the likeliest; None: do not
    """

    def __init__(
        self,
        sampling: Sampling,
        prompt: Sequence[int],
        *,
        top: int | None = None,
        constraint: Constraint | None = None,
    ) -> None:
        self._sampling, self._top, self._constraint = sampling, top, constraint
        self._random = random.Random(sampling.seed)
        self._answered: set[int] = set()
        #: added to the logits: bias and penalties. Made when the vocabulary's size is known, if there are any.
        self._offset: torch.Tensor | None = None
        self._seen = torch.tensor(sorted(set(prompt)))
        #: of the tokens picked, oldest first
        self.likelihoods: deque[Likelihood] = deque()

    def __call__(self, ids: Sequence[int], logits: torch.Tensor) -> int:
        """The next token's id. `logits`, float32 `[vocabulary]`, may be overwritten."""
        # of the values that were asked for, the sum of all exponentials is the only one that needs all logits
        total = logits.logsumexp(0) if self._top is not None else None
        top = logits.topk(self._top) if self._top else None
        original = logits.clone() if self._top is not None else logits
        logits = self._penalized(logits)
        if self._constraint is not None:
            logits = logits.masked_fill_(~self._constraint.allowed(len(logits)), float("-inf"))
        token = self._pick(logits)
        if self._constraint is not None:
            self._constraint.advance(token)
        self._note(token)
        if total is not None:
            likeliest = (
                [] if top is None else list(zip(top.indices.tolist(), (top.values - total).tolist(), strict=True))
            )
            self.likelihoods.append(Likelihood(token, float(original[token] - total), likeliest))
        return token

    def _penalized(self, logits: torch.Tensor) -> torch.Tensor:
        sampling = self._sampling
        if sampling.repetition_penalty != 1.0:
            seen = logits[self._seen]
            logits[self._seen] = torch.where(
                seen > 0, seen / sampling.repetition_penalty, seen * sampling.repetition_penalty
            )
        if self._offset is None and (sampling.logit_bias or sampling.presence_penalty or sampling.frequency_penalty):
            self._offset = torch.zeros(len(logits))
            for token, bias in sampling.logit_bias.items():
                self._offset[token] += bias
        if self._offset is not None:
            logits += self._offset
        return logits

    def _note(self, token: int) -> None:
        sampling = self._sampling
        if self._offset is not None:
            self._offset[token] -= sampling.frequency_penalty
            if token not in self._answered:
                self._offset[token] -= sampling.presence_penalty
        if token not in self._answered and sampling.repetition_penalty != 1.0:
            self._seen = torch.cat([self._seen, torch.tensor([token])]).unique()
        self._answered.add(token)

    def _pick(self, logits: torch.Tensor) -> int:
        sampling = self._sampling
        if sampling.temperature < _COLD:
            return int(logits.argmax())
        logits = logits / sampling.temperature
        ids: torch.Tensor | None = None
        if 0 < sampling.top_k < len(logits):
            logits, ids = logits.topk(sampling.top_k)
        chances = logits.softmax(0)
        if sampling.top_p < 1.0:
            chances, places = _nucleus(chances, sampling.top_p)
            ids = places if ids is None else ids[places]
        if sampling.min_p > 0.0:
            chances = chances * (chances >= sampling.min_p * chances.max())
        sums = chances.double().cumsum(0)
        drawn = self._random.random() * sums[-1:]
        place = min(int(torch.searchsorted(sums, drawn, right=True)), len(sums) - 1)
        return place if ids is None else int(ids[place])


def _nucleus(chances: torch.Tensor, share: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest that together have `share` of the probability, and their places."""
    for size in _NUCLEUS_SIZES:
        if size < len(chances):
            likeliest, places = chances.topk(size)
            before = likeliest.cumsum(0) - likeliest
            if float(before[-1]) >= share:
                count = max(1, int((before < share).sum()))
                return likeliest[:count], places[:count]
    # a flat distribution; sorting the values alone is several times faster than sorting them with their places
    values = torch.from_numpy(np.sort(chances.numpy())[::-1].copy())
    count = max(1, int((values.cumsum(0) - values < share).sum()))
    places = (chances >= values[count - 1]).nonzero().squeeze(1)
    return chances[places], places
