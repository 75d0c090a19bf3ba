"""Linear layers with weights of 8 or 4 bits.

Weights only: the inputs stay as they are (rounded to 8 bits, one scale a token, they would cost SmolLM2 3 % of its
perplexity).

- `int8`: one scale for each output, symmetric.
- `int4`: a scale and a zero point for each 32 numbers of an output.

Which way is the fastest depends on the number of tokens. Few are multiplied with the codes themselves (`_few`): the
kernels read a half or a quarter of the bytes. For many, the arithmetic counts and not the bytes: the weights are turned
into bfloat16 for the one product.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Iterator
from typing import Self

import torch
import torch.nn.functional as F

from lilliput.models.linear import FrozenLinear, joined_bias

GROUP = 32
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

    @property
    def nbytes(self) -> int:
        """Of memory."""
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, torch.Tensor))


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
        codes = torch.empty(weight.shape, dtype=torch.int8)
        scales = torch.empty(weight.shape[0], dtype=torch.bfloat16)
        for some in _slices(weight):
            wide = weight[some].float()
            # the codes are chosen for the scale as it is kept, so that rounding it costs nothing
            scales[some] = (wide.abs().amax(dim=1) / 127).clamp_(min=torch.finfo(torch.float32).tiny)
            codes[some] = (wide / scales[some].float()[:, None]).round_().clamp_(-127, 127)
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
        super().__init__(_pack(codes), scales, bias, dtype)
        block = _readable()
        readable = block is not None and self.out_features % block == 0
        #: what `_codes` was made of, two codes a byte, where it cannot be read from there
        self._pairs = None if readable else codes[:, ::2] | (codes[:, 1::2] << 4)

    @classmethod
    def of(cls, weight: torch.Tensor, bias: torch.Tensor | None) -> Self:
        rows, columns = weight.shape
        codes = torch.empty(rows, columns, dtype=torch.uint8)
        both = torch.empty(columns // GROUP, rows, 2, dtype=torch.bfloat16)
        for some in _slices(weight):
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
        block = _readable()
        assert block is not None
        return _unpack(self._codes, self.out_features, self.in_features, block)


#: outputs that torch's kernel keeps together, depending on how long the processor's vectors are
_BLOCKS = (64, 32)


def _pack(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [out, in] as torch's kernel wants them, in parts: it takes them in 32 bits, eight times what comes out."""
    block = max(_BLOCKS)
    rows = max(block, _AT_A_TIME // codes.shape[1] // block * block) if _divisible() else codes.shape[0]
    packed = torch.empty(codes.shape[0], codes.shape[1] // 2, dtype=torch.uint8)
    for begin in range(0, codes.shape[0], rows):
        packed[begin : begin + rows] = _pack_at_once(codes[begin : begin + rows])
    return packed


def _pack_at_once(codes: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), 1)


def _unpack(packed: torch.Tensor, rows: int, columns: int, block: int) -> torch.Tensor:
    """What `_pack` made, in the layout that it has where `_readable()`."""
    pairs = packed.view(rows // block, columns, block // 2)
    return torch.cat([pairs & 15, pairs >> 4], dim=-1).transpose(1, 2).reshape(rows, columns)


def _some_codes(rows: int) -> torch.Tensor:
    return torch.randint(0, 16, (rows, GROUP), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@functools.cache
def _divisible() -> bool:
    """Whether outputs are packed in the same way alone as among others."""
    codes = _some_codes(2 * max(_BLOCKS) + 16)
    return torch.equal(torch.cat([_pack_at_once(part) for part in codes.split(max(_BLOCKS))]), _pack_at_once(codes))


@functools.cache
def _readable() -> int | None:
    """How many outputs lie together, if the kernel's layout is one that `_unpack` reads. It is tried: no word is
    written about it."""
    codes = _some_codes(2 * max(_BLOCKS))
    packed = _pack_at_once(codes)
    if packed.nbytes != codes.numel() // 2:
        return None
    return next((block for block in _BLOCKS if torch.equal(_unpack(packed, len(codes), GROUP, block), codes)), None)


def _slices(weight: torch.Tensor) -> Iterator[slice]:
    """Rows [out, in] that are quantized at a time."""
    rows, columns = weight.shape
    step = max(1, _AT_A_TIME // columns)
    return (slice(begin, begin + step) for begin in range(0, rows, step))


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
