"""Attention with linear biases: the further back a key, the less it weighs, at a slope of each head's own."""

from __future__ import annotations

from collections.abc import Callable

import torch

_SHORTEST = 256


class Alibi:
    """Biases of keys by their place, made by a family's own function and kept for the lengths that were asked for.

    Softmax does not notice a bias that is the same for all keys, so the place from which the distance counts is free.

    :param build: from a number of keys to biases, `[heads, keys]` or any shape with as many numbers
    """

    def __init__(self, heads: int, build: Callable[[int], torch.Tensor]) -> None:
        self._heads, self._build = heads, build
        self._table = torch.empty(heads, 0)

    def __call__(self, keys: int) -> torch.Tensor:
        """float32 `[heads, keys]`, to be added to scaled scores."""
        if keys > self._table.shape[1]:
            length = max(2 * keys, _SHORTEST)
            self._table = self._build(length).float().view(self._heads, length)
        return self._table[:, :keys]
