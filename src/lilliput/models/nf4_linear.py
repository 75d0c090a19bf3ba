"""A linear layer with weights of 4 bits that stand for unevenly spaced numbers, and a scale for each 32 of an output.

That is NormalFloat (Dettmers et al. 2023, https://arxiv.org/abs/2305.14314): of what is normally distributed, each of
the sixteen numbers stands for as much. The kernels are bitsandbytes': for CUDA, and for processors with AVX512-BF16.
"""

from __future__ import annotations

import functools
import logging
from typing import Any, Self

import torch
import torch.nn.functional as F

from lilliput.errors import ModelError
from lilliput.models.quantized_linear import QuantizedLinear, bias_of, one_by_one, slices

GROUP = 32
_KIND = "nf4"
#: outputs that the processor's kernel keeps together
_BLOCK = 32
#: codes that are arranged at a time, so that they stay in the processor's cache
_AT_A_TIME = 1 << 18


class Nf4Linear(QuantizedLinear):
    """
    :param codes: uint8 [out, in / 2], as bitsandbytes has them: two in a byte, the first in the high bits
    :param scales: [out, in / GROUP], bfloat16's numbers
    """

    def __init__(
        self, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> None:
        self.out_features, self.in_features = codes.shape[0], 2 * codes.shape[1]
        self.bias, self.dtype = bias, dtype
        #: whether they are as the processor's kernel wants them
        self._laid_out = codes.device.type == "cpu" and has_kernel()
        self._codes, self._scales = _lay_out(codes, scales) if self._laid_out else (codes, scales.float())

    @classmethod
    def check(cls, device: torch.device) -> None:
        _bitsandbytes()
        if device.type == "cpu" and not has_kernel():
            raise ModelError(
                "nf4 needs CUDA (--device cuda), or a processor with AVX512-BF16, which this one is not: take int4"
            )

    @classmethod
    def of(cls, weight: torch.Tensor, bias: torch.Tensor | None) -> Self:
        rows, columns = weight.shape
        codes = weight.new_empty(rows, columns // 2, dtype=torch.uint8)
        scales = weight.new_empty(rows, columns // GROUP, dtype=torch.bfloat16)
        for some in slices(weight):
            found, state = _functions().quantize_4bit(weight[some].contiguous(), blocksize=GROUP, quant_type=_KIND)
            codes[some], scales[some] = found.view(-1, columns // 2), state.absmax.view(-1, columns // GROUP)
        return cls(codes, scales, bias, weight.dtype)

    @classmethod
    def joined(cls, layers: list[Self]) -> Self:
        bias, dtype, columns = bias_of(layers), layers[0].dtype, layers[0].in_features
        rows = sum(layer.out_features for layer in layers)
        codes = layers[0]._codes.new_empty(rows, columns // 2)
        scales = layers[0]._scales.new_empty(rows, columns // GROUP)
        for some, layer in one_by_one(layers):
            codes[some], scales[some] = layer._plain()
            del layer
        return cls(codes, scales, bias, dtype)

    def dequantized(self) -> torch.Tensor:
        codes, scales = self._plain()
        return _functions().dequantize_4bit(codes.view(-1, 1), self._state(scales))

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        if self._laid_out:
            shape = [len(self._codes), self.in_features]
            gemv = torch.ops.bitsandbytes.gemv_4bit  # it takes any number of tokens
            return gemv(x.bfloat16(), self._codes, shape, self._scales, _table(x.device), GROUP)[:, : self.out_features]
        return _bitsandbytes().matmul_4bit(x, self._codes.view(-1, 1), self._state(self._scales))

    def _plain(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and scales as they came."""
        if not self._laid_out:
            return self._codes, self._scales
        codes, scales = _undo(self._codes, self._scales)
        return codes[: self.out_features], scales[: self.out_features]

    def _state(self, scales: torch.Tensor) -> Any:
        return _functions().QuantState(
            absmax=scales.float().flatten(),
            shape=torch.Size([self.out_features, self.in_features]),
            dtype=self.dtype,
            blocksize=GROUP,
            code=_table(scales.device),
            quant_type=_KIND,
        )


def _lay_out(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales as the processor's kernel reads them: of each two inputs, 32 outputs side by side, of which the
    first 16 in the low bits; the scales of all outputs for one group after the other. Outputs are filled up."""
    rows, pairs = codes.shape
    filled = F.pad(scales, (0, 0, 0, -rows % _BLOCK)).bfloat16().t().contiguous()
    packed = codes.new_empty(filled.shape[1], pairs)
    step = max(1, _AT_A_TIME // pairs // _BLOCK) * _BLOCK
    for begin in range(0, rows, step):
        some = codes[begin : begin + step]
        some = F.pad(some, (0, 0, 0, -len(some) % _BLOCK))
        both = torch.stack([some >> 4, some & 15], dim=-1).view(-1, 2, _BLOCK // 2, pairs, 2)
        packed[begin : begin + step] = (both[:, 0] | both[:, 1] << 4).transpose(1, 2).reshape(-1, pairs)
    return packed, filled


def _undo(packed: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What `_lay_out` was given, filled up."""
    rows, pairs = packed.shape
    halves = packed.view(-1, pairs, _BLOCK // 2, 2).transpose(1, 2)
    both = torch.stack([halves & 15, halves >> 4], dim=1)
    return (both[..., 0] << 4 | both[..., 1]).view(rows, pairs), scales.t()


@functools.cache
def has_kernel() -> bool:
    """Whether bitsandbytes multiplies on this processor, with codes as `_lay_out` arranges them. That is written
    nowhere, so it is tried."""
    functions = _functions()
    if not functions.has_avx512bf16():
        return False
    generator = torch.Generator().manual_seed(0)
    cpu = torch.device("cpu")
    codes = torch.randint(0, 256, (3 * _BLOCK, GROUP), dtype=torch.uint8, device=cpu, generator=generator)
    scales = torch.rand(len(codes), 2, device=cpu, generator=generator).bfloat16()
    table = _table(cpu)
    wide = torch.stack([table[(codes >> 4).long()], table[(codes & 15).long()]], dim=-1).view(-1, 2, GROUP)
    x = torch.randn(3, 2 * GROUP, device=cpu, generator=generator).bfloat16()
    expected = x.float() @ (wide * scales[..., None]).flatten(1).t()
    try:
        packed, theirs = _lay_out(codes, scales)
        got = torch.ops.bitsandbytes.gemv_4bit(x, packed, [len(codes), 2 * GROUP], theirs, table, GROUP)
    except (AttributeError, RuntimeError):
        return False
    return bool((got - expected).norm() < 0.02 * expected.norm())


@functools.cache
def _table(device: torch.device) -> torch.Tensor:
    """What the codes stand for."""
    table: torch.Tensor = _functions().get_4bit_type(_KIND, device=device)
    return table


@functools.cache
def _bitsandbytes() -> Any:
    log = logging.getLogger("bitsandbytes")
    level = log.level
    log.setLevel(logging.ERROR)  # it warns that it could not fetch another kernel, which nobody asked for
    try:
        import bitsandbytes
    except ImportError as e:
        raise ModelError("nf4 needs the package bitsandbytes: pip install bitsandbytes, or take int4") from e
    finally:
        log.setLevel(level)
    return bitsandbytes


def _functions() -> Any:
    return _bitsandbytes().functional
