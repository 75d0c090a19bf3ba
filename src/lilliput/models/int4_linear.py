"""A linear layer with weights of 4 bits, and a scale and a zero for each 32 numbers of an output.

A few tokens are multiplied with the codes by torch's own kernel, which reads a quarter of the bytes. For many,
arithmetic counts and not bytes: weights are made wide, so many at a time as stay in the processor's cache.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Self

import torch

from lilliput.errors import ModelError
from lilliput.models.quantized_linear import QuantizedLinear, bias_of, one_by_one, slices

GROUP = 32
#: from so many tokens on, weights are made wide
_MANY = 128
#: candidates for the width of a group's grid, as shares of its range: outliers may be cut off for the others' sake
_SHARES = (1.0, 0.9)
#: of weights that were of 4 bits before, in other groups: how many steps of their old grid a group's range may have
_STEPS = range(4, 16)
#: a squared error of such a share is what the rounding of scales makes, and no other grid is better
_EXACT = 1e-4
#: groups in which is looked whether they were
_LOOKED_AT = 64
#: outputs that torch's kernel keeps together, depending on how long the processor's vectors are
_BLOCKS = (64, 32)
#: numbers that are packed or read back at a time
_AT_A_TIME = 1 << 18
#: numbers that are made wide at a time: few enough for the processor's cache, and enough for a fast product
_WIDE_AT_A_TIME = 1 << 21


class Int4Linear(QuantizedLinear):
    """
    :param codes: uint8 [out, in]
    :param scales: bfloat16 [in / GROUP, out, 2], each with its zero
    """

    def __init__(
        self, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> None:
        self.out_features, self.in_features = codes.shape
        self.bias, self.dtype = bias, dtype
        self._scales, self._packed = scales, _pack(codes)
        block = _readable()
        #: what `_packed` was made of, two codes a byte, where it cannot be read from there
        self._pairs: torch.Tensor | None = None
        if block is None or self.out_features % block:
            self._pairs, block = codes[:, ::2] | (codes[:, 1::2] << 4), min(_BLOCKS)
        self._block: int = block

    @classmethod
    def check(cls, device: torch.device) -> None:
        if device.type != "cpu":
            raise ModelError(
                "int4 is for the processor's kernels; on other devices take nf4, which is as small, or int8"
            )
        if not hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu"):
            raise ModelError(f"torch {torch.__version__} has no kernels for int4 weights; take a newer one")

    @classmethod
    def of(cls, weight: torch.Tensor, bias: torch.Tensor | None) -> Self:
        rows, columns = weight.shape
        codes = torch.empty(rows, columns, dtype=torch.uint8)
        both = torch.empty(columns // GROUP, rows, 2, dtype=torch.bfloat16)
        grid = _old_grid if _has_few_values(weight) else _grid
        for some in slices(weight):
            found, scales, zeros = grid(weight[some].float().reshape(-1, columns // GROUP, GROUP))
            codes[some] = found.view(-1, columns)
            both[:, some, 0], both[:, some, 1] = scales.t(), zeros.t()
        return cls(codes, both, bias, weight.dtype)

    @classmethod
    def joined(cls, layers: list[Self]) -> Self:
        bias, dtype, columns = bias_of(layers), layers[0].dtype, layers[0].in_features
        scales = torch.cat([layer._scales for layer in layers], dim=1)
        codes = torch.empty(scales.shape[1], columns, dtype=torch.uint8)
        for some, layer in one_by_one(layers):
            for part, found in layer._codes():
                codes[some][part] = found.t()
            del layer
        return cls(codes, scales, bias, dtype)

    def dequantized(self) -> torch.Tensor:
        return torch.cat([part for _, part in self._wide()], dim=1).t()

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) < _MANY:
            return torch.ops.aten._weight_int4pack_mm_for_cpu(x.bfloat16(), self._packed, GROUP, self._scales)
        x = x.to(self.dtype)
        out = torch.empty(len(x), self.out_features, dtype=self.dtype)
        for some, part in self._wide():
            out[:, some] = x @ part
        return out

    def _wide(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Some outputs after the others, with their weights [in, some]."""
        for some, codes in self._codes(_WIDE_AT_A_TIME):
            scales, zeros = self._scales[:, some].float().permute(2, 0, 1).contiguous()
            grouped = codes.float().view(-1, GROUP, codes.shape[1])
            wide = grouped.sub_(8).mul_(scales[:, None]).add_(zeros[:, None])
            yield some, wide.view_as(codes).to(self.dtype)

    def _codes(self, at_a_time: int = _AT_A_TIME) -> Iterator[tuple[slice, torch.Tensor]]:
        """Some outputs after the others, with their codes, one a byte: [in, some]."""
        columns = self.in_features
        step = max(1, at_a_time // columns // self._block) * self._block
        for begin in range(0, self.out_features, step):
            some = slice(begin, min(begin + step, self.out_features))
            if self._pairs is not None:
                pairs = self._pairs[some]
                yield some, torch.stack([pairs & 15, pairs >> 4], dim=-1).flatten(1).t().contiguous()
            else:
                half = self._block // 2
                packed = self._packed.view(-1, columns, half)[begin // self._block : some.stop // self._block]
                both = torch.cat([packed & 15, packed >> 4], dim=-1)  # [blocks, in, block]
                yield some, both.transpose(0, 1).reshape(columns, -1)


def _pack(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [out, in] as torch's kernel wants them, in parts: it takes them in 32 bits, eight times what comes out."""
    rows, columns = codes.shape
    block = max(_BLOCKS)
    step = max(1, _AT_A_TIME // columns // block) * block if _divisible() else rows
    packed = torch.empty(rows, columns // 2, dtype=torch.uint8)
    for begin in range(0, rows, step):
        packed[begin : begin + step] = _pack_at_once(codes[begin : begin + step])
    return packed


def _pack_at_once(codes: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), 1)


def _some_codes(rows: int) -> torch.Tensor:
    return torch.randint(0, 16, (rows, GROUP), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@functools.cache
def _divisible() -> bool:
    """Whether outputs are packed in the same way alone as among others."""
    codes = _some_codes(2 * max(_BLOCKS) + 16)
    return torch.equal(torch.cat([_pack_at_once(part) for part in codes.split(max(_BLOCKS))]), _pack_at_once(codes))


@functools.cache
def _readable() -> int | None:
    """How many outputs lie together, if the kernel's layout is as `_codes` reads it. That is written nowhere, so it is
    tried: of each block, the bytes of an input hold its first outputs in the low bits, the others in the high ones."""
    codes = _some_codes(2 * max(_BLOCKS))
    for block in _BLOCKS:
        low, high = codes.view(-1, 2, block // 2, GROUP).transpose(2, 3).unbind(dim=1)
        if torch.equal((low | high << 4).flatten(), _pack_at_once(codes).view(torch.uint8).flatten()):
            return block
    return None


Grid = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _grid(groups: torch.Tensor) -> Grid:
    """Codes 0 to 15, scales and zeros with the least squared error: `groups` is about (codes - 8) * scale + zero.

    :param groups: float32 [rows, groups, GROUP]
    :returns: uint8 of the same shape; float32 [rows, groups] twice, as bfloat16 keeps them
    """
    low, high = groups.amin(dim=-1, keepdim=True), groups.amax(dim=-1, keepdim=True)
    scales = ((high - low) * (share / 15) for share in _SHARES)
    return _best(groups, ((scale, (low + high + scale) / 2) for scale in scales))


def _old_grid(groups: torch.Tensor) -> Grid:
    """As `_grid`, for what lies on a grid already, of which a group may use a part only: it is kept as it is."""
    low, high = groups.amin(dim=-1, keepdim=True), groups.amax(dim=-1, keepdim=True)
    scales = ((high - low) / steps for steps in reversed(_STEPS))
    return _best(groups, ((scale, low + 8 * scale) for scale in scales))


def _best(groups: torch.Tensor, grids: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Grid:
    best: tuple[torch.Tensor, ...] | None = None
    enough = _EXACT * groups.square().sum()
    for scale, zero in grids:
        scale, zero = scale.clamp(min=1e-8).bfloat16().float(), zero.bfloat16().float()
        codes = ((groups - zero) / scale + 8).round_().clamp_(0, 15)
        error = ((codes - 8) * scale + zero - groups).square_().sum(dim=-1, keepdim=True)
        if best is None:
            best = error, codes, scale, zero
        else:
            better = error < best[0]
            best = tuple(
                torch.where(better, new, old) for new, old in zip((error, codes, scale, zero), best, strict=True)
            )
        if best[0].sum() <= enough:
            break
    assert best is not None
    _, codes, scale, zero = best
    return codes.to(torch.uint8), scale[..., 0], zero[..., 0]


def _has_few_values(weight: torch.Tensor) -> bool:
    """Whether groups have at most 16 different numbers each, as few have by chance."""
    groups = weight[: -(-_LOOKED_AT * GROUP // weight.shape[1])].reshape(-1, GROUP)[:_LOOKED_AT]
    different = (groups.sort(dim=-1).values.diff(dim=-1) != 0).sum(dim=-1) + 1
    return bool((different <= 16).float().mean() > 0.9)
