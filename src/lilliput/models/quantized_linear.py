"""A linear layer whose weights are integer codes.

Weights only: what comes in stays as it is. (Rounded to 8 bits, with one scale a token, it would cost SmolLM2 3 % of its
perplexity.)
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Self, TypeVar

import torch

from lilliput.models.linear import FrozenLinear, joined_bias

#: numbers that are quantized at a time, so that they stay in the processor's cache
_AT_A_TIME = 1 << 17

L = TypeVar("L", bound="QuantizedLinear")


class QuantizedLinear(FrozenLinear):
    """
    :ivar dtype: that of the weights before
    """

    dtype: torch.dtype

    @classmethod
    @abstractmethod
    def check(cls, device: torch.device) -> None:
        """Raise `ModelError` if there are no such layers on this device."""

    @classmethod
    @abstractmethod
    def of(cls, weight: torch.Tensor, bias: torch.Tensor | None) -> Self:
        """Quantized from `weight` [out, in]."""

    @classmethod
    @abstractmethod
    def joined(cls, layers: list[Self]) -> Self:
        """Several layers of the same input as one, outputs side by side. The list is emptied: each layer that nobody
        else has is freed when it has been copied."""

    @abstractmethod
    def dequantized(self) -> torch.Tensor:
        """The weight that the codes stand for: [out, in]."""

    @abstractmethod
    def _product(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, in] -> [tokens, out], of any dtype, without the bias."""

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        out = self._product(x.reshape(-1, self.in_features)).to(x.dtype)
        if self.bias is not None:
            out += self.bias
        return out.view(*x.shape[:-1], self.out_features)

    def backward(self, grad: torch.Tensor) -> torch.Tensor:
        return grad @ self.dequantized()

    @property
    def nbytes(self) -> int:
        """Of memory."""
        tensors = [value for value in vars(self).values() if isinstance(value, torch.Tensor)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def slices(weight: torch.Tensor) -> Iterator[slice]:
    """Rows [out, in] that are quantized at a time."""
    rows, columns = weight.shape
    step = max(1, _AT_A_TIME // columns)
    return (slice(begin, begin + step) for begin in range(0, rows, step))


def bias_of(layers: Sequence[QuantizedLinear]) -> torch.Tensor | None:
    """Of layers side by side."""
    return joined_bias([layer.bias for layer in layers], [layer.out_features for layer in layers], layers[0].dtype)


def one_by_one(layers: list[L]) -> Iterator[tuple[slice, L]]:
    """Takes the layers out of the list, each with the places of its outputs among all of them."""
    begin = 0
    while layers:
        some = slice(begin, begin + layers[0].out_features)
        begin = some.stop
        yield some, layers.pop(0)
