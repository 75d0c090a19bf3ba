"""Linear layers with weights of 8 or 4 bits.

Weights only: the inputs stay as they are (rounded to 8 bits, one scale a token, they would cost SmolLM2 3 % of its
perplexity), and so do layers whose shapes no kernel takes, norms, and expert layers that are one large tensor.

- `int8`: one scale for each output, symmetric.
- `int4`: a scale and a zero point for each 32 numbers of an output.

Which way is the fastest depends on the number of tokens. Few are multiplied with the codes themselves (`_few`): the
kernels read a half or a quarter of the bytes. For many, the arithmetic counts and not the bytes: the weights are turned
into bfloat16 for the one product.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Sequence
from typing import Self

import torch
import torch.nn.functional as F
from torch import nn

from lilliput.errors import ModelError
from lilliput.models.linear import FrozenLinear, joined_bias

GROUP = 32
#: torch's kernels take outputs and inputs in multiples of these
_OUTPUTS, _INPUTS = 16, GROUP
#: candidates for the width of a group's grid, as shares of its range: outliers may be cut off for the others' sake
_SHARES = (1.0, 0.9)
#: numbers that are quantized at a time, so that they stay in the processor's cache
_AT_A_TIME = 1 << 17


class QuantizedLinear(FrozenLinear):
    """A linear layer of integer codes."""

    #: from so many tokens on, the weights are made 16 bits wide again for a product
    many: int

    def __init__(
        self, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> None:
        self._codes, self._scales = codes, scales
        self.bias, self.dtype = bias, dtype

    @classmethod
    @abstractmethod
    def of(cls, weight: torch.Tensor, bias: torch.Tensor | None) -> Self:
        """Quantized from `weight` [out, in]."""

    @classmethod
    @abstractmethod
    def joined(cls, *layers: Self) -> Self:
        """Several layers of the same input as one, outputs side by side."""

    @abstractmethod
    def dequantized(self) -> torch.Tensor:
        """The weight that the codes stand for: [out, in]."""

    @abstractmethod
    def _few(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, in] -> [tokens, out], in bfloat16."""

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features)
        if rows.shape[0] >= self.many:
            return F.linear(x, self.dequantized(), self.bias)
        out = self._few(rows.to(torch.bfloat16)).to(x.dtype)
        if self.bias is not None:
            out += self.bias
        return out.view(*x.shape[:-1], self.out_features)

    def backward(self, grad: torch.Tensor) -> torch.Tensor:
        return grad @ self.dequantized()


class Int8Linear(QuantizedLinear):
    many = 12

    def __init__(
        self, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> None:
        """:param codes: int8 [out, in]; :param scales: bfloat16 [out]"""
        super().__init__(codes, scales, bias, dtype)
        self.out_features, self.in_features = codes.shape

    @classmethod
    def of(cls, weight: torch.Tensor, bias: torch.Tensor | None) -> Self:
        wide = weight.float()
        # the codes are chosen for the scale as it is kept, so that rounding it costs nothing
        scales = (wide.abs().amax(dim=1) / 127).clamp_(min=torch.finfo(torch.float32).tiny).bfloat16()
        codes = (wide / scales.float()[:, None]).round_().clamp_(-127, 127).to(torch.int8)
        return cls(codes, scales, bias, weight.dtype)

    @classmethod
    def joined(cls, *layers: Self) -> Self:
        bias = joined_bias([layer.bias for layer in layers], [layer.out_features for layer in layers], layers[0].dtype)
        codes = torch.cat([layer._codes for layer in layers])
        return cls(codes, torch.cat([layer._scales for layer in layers]), bias, layers[0].dtype)

    def dequantized(self) -> torch.Tensor:
        return self._codes.to(self.dtype).mul_(self._scales.to(self.dtype)[:, None])

    def _few(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten._weight_int8pack_mm(x, self._codes, self._scales)


class Int4Linear(QuantizedLinear):
    many = 96

    def __init__(
        self, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> None:
        """:param codes: uint8 [out, in]; :param scales: bfloat16 [in / GROUP, out, 2], each with its zero"""
        self.out_features, self.in_features = codes.shape
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), 1)
        super().__init__(packed, scales, bias, dtype)
        readable = _readable() and self.out_features % _BLOCK == 0
        #: what `_codes` was made of, two codes a byte, where it cannot be read from there
        self._pairs = None if readable else codes[:, ::2] | (codes[:, 1::2] << 4)

    @classmethod
    def of(cls, weight: torch.Tensor, bias: torch.Tensor | None) -> Self:
        rows, columns = weight.shape
        codes = torch.empty(rows, columns, dtype=torch.uint8)
        both = torch.empty(columns // GROUP, rows, 2, dtype=torch.bfloat16)
        for begin in range(0, rows, max(1, _AT_A_TIME // columns)):
            some = slice(begin, begin + max(1, _AT_A_TIME // columns))
            found, scales, zeros = _grid(weight[some].float().reshape(-1, columns // GROUP, GROUP))
            codes[some] = found.view(-1, columns)
            both[:, some, 0], both[:, some, 1] = scales.t(), zeros.t()
        return cls(codes, both, bias, weight.dtype)

    @classmethod
    def joined(cls, *layers: Self) -> Self:
        bias = joined_bias([layer.bias for layer in layers], [layer.out_features for layer in layers], layers[0].dtype)
        codes = torch.cat([layer._unpacked() for layer in layers])
        return cls(codes, torch.cat([layer._scales for layer in layers], dim=1), bias, layers[0].dtype)

    def dequantized(self) -> torch.Tensor:
        codes = self._unpacked().view(self.out_features, -1, GROUP).to(self.dtype)
        scales, zeros = self._scales.to(self.dtype).permute(2, 1, 0)[..., None]
        return codes.sub_(8).mul_(scales).add_(zeros).view(self.out_features, self.in_features)

    def _few(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x, self._codes, GROUP, self._scales)

    def _unpacked(self) -> torch.Tensor:
        """uint8 [out, in], one code a byte."""
        if self._pairs is not None:
            return torch.stack([self._pairs & 15, self._pairs >> 4], dim=-1).flatten(1)
        return _unpack(self._codes, self.out_features, self.in_features)


#: outputs that torch's kernel keeps together where vectors have 512 bits
_BLOCK = 64


def _unpack(packed: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """What `_convert_weight_to_int4pack_for_cpu` made, in the layout that it has where `_readable()`."""
    pairs = packed.view(rows // _BLOCK, columns, _BLOCK // 2)
    return torch.cat([pairs & 15, pairs >> 4], dim=-1).transpose(1, 2).reshape(rows, columns)


@functools.cache
def _readable() -> bool:
    """Whether the kernel's layout is the one that `_unpack` reads. It is not documented, so it is tried."""
    codes = torch.randint(0, 16, (2 * _BLOCK, GROUP), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    return packed.nbytes == codes.numel() // 2 and torch.equal(_unpack(packed, *codes.shape), codes.byte())


def _grid(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes 0 to 15, scales and zeros with the least squared error: `groups` is about (codes - 8) * scale + zero.

    :param groups: float32 [rows, groups, GROUP]
    :returns: uint8 of the same shape; float32 [rows, groups] twice, as bfloat16 keeps them
    """
    low, high = groups.amin(dim=-1, keepdim=True), groups.amax(dim=-1, keepdim=True)
    middle, range_ = (low + high) / 2, high - low
    best: tuple[torch.Tensor, ...] | None = None
    for share in _SHARES:
        scale = (range_ * (share / 15)).clamp(min=1e-8).bfloat16().float()
        zero = (middle + scale / 2).bfloat16().float()
        codes = ((groups - zero) / scale + 8).round_().clamp_(0, 15)
        error = ((codes - 8) * scale + zero - groups).square_().sum(dim=-1, keepdim=True)
        if best is None:
            best = error, codes, scale, zero
        else:
            better = error < best[0]
            best = tuple(
                torch.where(better, new, old) for new, old in zip((error, codes, scale, zero), best, strict=True)
            )
    assert best is not None
    _, codes, scale, zero = best
    return codes.to(torch.uint8), scale[..., 0], zero[..., 0]


_KINDS: dict[str, type[QuantizedLinear]] = {"int8": Int8Linear, "int4": Int4Linear}
KINDS = tuple(_KINDS)


class QuantizedModule(nn.Module):
    """Stands for a linear layer in a family's block."""

    def __init__(self, layer: QuantizedLinear) -> None:
        super().__init__()
        self.layer = layer
        self.in_features, self.out_features = layer.in_features, layer.out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def check(kind: str | None) -> None:
    """Raise `ModelError` for a quantization that does not exist, or not here."""
    if kind == "nf4":
        raise ModelError("nf4 needs bitsandbytes and a CUDA device; servers compute on the processor. Take int4.")
    if kind is not None and kind not in _KINDS:
        raise ModelError(f"unknown quantization {kind!r}; known are {', '.join(_KINDS)}")
    ops = torch.ops.aten
    if kind is not None and not (hasattr(ops, "_weight_int8pack_mm") and hasattr(ops, "_weight_int4pack_mm_for_cpu")):
        raise ModelError(f"torch {torch.__version__} has no kernels for {kind} weights; take a newer one")


def quantize(block: nn.Module, kind: str) -> None:
    """Replace a block's linear layers by quantized ones, where a kernel takes their shape."""
    make = _KINDS[kind]
    for owner in list(block.modules()):
        for name, child in list(owner.named_children()):
            weight = _weight(child)
            if weight is not None and weight.shape[0] % _OUTPUTS == 0 and weight.shape[1] % _INPUTS == 0:
                bias = getattr(child, "bias", None)
                layer = make.of(weight.detach().contiguous(), None if bias is None else bias.detach())
                setattr(owner, name, QuantizedModule(layer))


def _weight(module: nn.Module) -> torch.Tensor | None:
    """A linear layer's weight [out, in], or None for other modules."""
    if type(module) is nn.Linear:
        return module.weight
    if type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers."):  # gpt2's linear layer
        return module.weight.t()  # type: ignore[operator]
    return None


def joined(modules: Sequence[QuantizedModule]) -> QuantizedLinear:
    """Quantized modules of the same input as one layer."""
    layers = [module.layer for module in modules]
    return layers[0] if len(layers) == 1 else type(layers[0]).joined(*layers)
