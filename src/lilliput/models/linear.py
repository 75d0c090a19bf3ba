"""Linear layers with the weights laid out once for the kernel that will read them.

On the CPU, oneDNN reads a weight fastest in a blocked layout of its own. `torch.nn.functional.linear` converts into it
at every call; converted once, one token through SmolLM2's blocks takes 12 ms instead of 20, sixteen take 14 instead of
25 (bfloat16, 2 cores). The same kernels add a residual, multiply by a gate, or apply SiLU while the result is still in
registers. Where torch lacks them (other devices, other dtypes), the plain operations are used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def _kernels() -> Any:
    """oneDNN's operations as torch has them, or None."""
    ops = torch.ops.mkldnn
    names = ("_linear_pointwise", "_reorder_linear_weight")
    return ops if torch.backends.mkldnn.is_available() and all(hasattr(ops, name) for name in names) else None


class FrozenLinear(ABC):
    """`x @ weight.T + bias` for weights that do not change, differentiable in `x`.

    :ivar bias: [out] or None
    """

    out_features: int
    in_features: int
    bias: torch.Tensor | None

    @abstractmethod
    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out], not differentiable."""

    @abstractmethod
    def backward(self, grad: torch.Tensor) -> torch.Tensor:
        """grad @ weight: [..., out] -> [..., in]"""

    def packed(self) -> FrozenLinear:
        """The layer as its kernel reads it fastest."""
        return self

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]"""
        if torch.is_grad_enabled() and x.requires_grad:
            return _Differentiable.apply(x, self)
        return self.compute(x)

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        """silu(linear(x))"""
        return F.silu(self(x))

    def times(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """linear(x) * other"""
        return self(x) * other

    def plus(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """linear(x) + other"""
        return self(x) + other


def joined_bias(biases: Sequence[torch.Tensor | None], sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
    """The bias of layers side by side, of which some may have none."""
    if all(bias is None for bias in biases):
        return None
    return torch.cat(
        [torch.zeros(n, dtype=dtype) if bias is None else bias.detach() for bias, n in zip(biases, sizes, strict=True)]
    )


class PackedLinear(FrozenLinear):
    """A linear layer in the dtype of its weights.

    :param weight: [out, in]; may be given up by the caller, a packed layer keeps its own copy only
    :param bias: [out] or None
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        weight = weight.detach()
        self.out_features, self.in_features = weight.shape
        self.bias = None if bias is None else bias.detach()
        self._ops: Any = _kernels() if weight.device.type == "cpu" else None
        self._weight: Any = weight
        self._packed: torch.Tensor | None = None
        self._packed_transpose: torch.Tensor | None = None
        if self._ops is not None:
            try:
                self._packed = self._ops._reorder_linear_weight(weight.contiguous())
                self._weight = None
            except RuntimeError:  # this processor has no kernel for this dtype
                self._ops = None

    def to(self, device: torch.device) -> PackedLinear:
        """The layer on a device; itself if it is there."""
        weight = self._weight if self._packed is None else self._packed
        if weight.device == device:
            return self
        plain = self._weight if self._packed is None else self._packed.to_dense()
        return PackedLinear(plain.to(device), None if self.bias is None else self.bias.to(device))

    @classmethod
    def joined(cls, *layers: nn.Linear) -> PackedLinear:
        """Several layers of the same input as one, outputs side by side."""
        weights = [layer.weight.detach() for layer in layers]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        sizes = [layer.out_features for layer in layers]
        return cls(weight, joined_bias([layer.bias for layer in layers], sizes, weight.dtype))

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed is not None:
            return self._ops._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return F.linear(x, self._weight, self.bias)

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed is not None and not (torch.is_grad_enabled() and x.requires_grad):
            return self._ops._linear_pointwise(x, self._packed, self.bias, "swish", [], "")
        return super().silu(x)

    def times(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        if self._packed is not None and not (torch.is_grad_enabled() and x.requires_grad):
            return self._ops._linear_pointwise.binary(x, other, self._packed, self.bias, "mul")
        return super().times(x, other)

    def plus(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        if self._packed is not None and not (torch.is_grad_enabled() and x.requires_grad):
            return self._ops._linear_pointwise.binary(x, other, self._packed, self.bias, "add")
        return super().plus(x, other)

    def backward(self, grad: torch.Tensor) -> torch.Tensor:
        """grad @ weight. The transposed layout is made at the first call: only servers that train pay for it."""
        if self._packed is None:
            return grad @ self._weight
        if self._packed_transpose is None:
            transpose = self._packed.to_dense().t().contiguous()
            self._packed_transpose = self._ops._reorder_linear_weight(transpose)
        return self._ops._linear_pointwise(grad.contiguous(), self._packed_transpose, None, "none", [], "")


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: FrozenLinear) -> torch.Tensor:
        ctx.layer = layer
        with torch.no_grad():
            return layer.compute(x.detach())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return ctx.layer.backward(grad), None
