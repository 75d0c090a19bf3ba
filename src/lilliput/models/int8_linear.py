"""A linear layer with weights of 8 bits and a scale for each output.

oneDNN multiplies integers of 8 bits faster than anything wider, but both sides have to be such. So what comes in is
written as integers of 16 bits, with a scale for each token, and these as two of 8: `step * (256 * high + low)`. That
loses less than bfloat16 itself does. Both halves go through one product, so the weights are read once.

For small layers the operations around the product cost more than it saves. There, where a processor has no such
products, and on other devices, torch's own kernel takes a few tokens, and for many the weights are made wide.
"""

from __future__ import annotations

import functools
import time
from typing import Any, Self

import torch
import torch.nn.functional as F

from lilliput.models.quantized_linear import QuantizedLinear, bias_of, one_by_one, slices

#: numbers in a weight that make it large
_LARGE = 1 << 22
#: numbers of 8 bits without a sign stand for themselves less this
_ZERO = 128
#: so that a token of zeros has a scale
_TINY = 1e-30
#: tokens that are multiplied at a time: their outputs come in 32 bits, and twice
_TOKENS = 512
#: from so many tokens on torch's own kernel is slower than wide weights
_MANY = 12
_TRIES, _TIMES_SLOWER = 3, 10


class Int8Linear(QuantizedLinear):
    """
    :param codes: int8 [out, in]
    :param scales: float32 [out], as bfloat16 has them
    """

    def __init__(
        self, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> None:
        self.out_features, self.in_features = codes.shape
        self.bias, self.dtype = bias, dtype
        self._scales = scales
        large = codes.device.type == "cpu" and codes.numel() >= _LARGE and _has_products()
        self._packed = torch.ops.onednn.qlinear_prepack(codes, None) if large else None
        self._plain = codes if self._packed is None else None

    @classmethod
    def check(cls, device: torch.device) -> None:
        pass  # everywhere

    @classmethod
    def of(cls, weight: torch.Tensor, bias: torch.Tensor | None) -> Self:
        codes = torch.empty_like(weight, dtype=torch.int8, memory_format=torch.contiguous_format)
        scales = weight.new_empty(weight.shape[0], dtype=torch.float32)
        for some in slices(weight):
            wide = weight[some].float()
            # the codes are chosen for the scale as it is kept, so that rounding it costs nothing
            scales[some] = (wide.abs().amax(dim=1) / 127).clamp_(min=torch.finfo(torch.float32).tiny).bfloat16().float()
            codes[some] = (wide / scales[some][:, None]).round_().clamp_(-127, 127).to(torch.int8)
        return cls(codes, scales, bias, weight.dtype)

    @classmethod
    def joined(cls, layers: list[Self]) -> Self:
        bias, dtype, columns = bias_of(layers), layers[0].dtype, layers[0].in_features
        scales = torch.cat([layer._scales for layer in layers])
        codes = scales.new_empty(len(scales), columns, dtype=torch.int8)
        for some, layer in one_by_one(layers):
            codes[some] = layer._codes()
            del layer
        return cls(codes, scales, bias, dtype)

    def dequantized(self) -> torch.Tensor:
        return self._codes().to(self.dtype).mul_(self._scales.to(self.dtype)[:, None])

    def _codes(self) -> torch.Tensor:
        """int8 [out, in]"""
        return self._plain if self._packed is None else self._packed.to_dense().t()  # type: ignore[return-value]

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed is not None:
            if len(x) <= _TOKENS:
                return _two_products(x, self._packed, self._scales)
            return torch.cat([_two_products(part, self._packed, self._scales).to(x.dtype) for part in x.split(_TOKENS)])
        if len(x) >= _MANY or not _takes_codes(x.device):
            return F.linear(x, self.dequantized())
        return torch.ops.aten._weight_int8pack_mm(x.bfloat16(), self._plain, self._scales.bfloat16())


def _two_products(x: torch.Tensor, packed: Any, scales: torch.Tensor) -> torch.Tensor:
    """[tokens, in] -> float32 [tokens, out]. Few operations: for one token each costs as much as a small layer."""
    step = x.abs().amax(dim=1, keepdim=True).float().add_(_TINY).div_(127 * 256)
    whole = (x / step).add_((_ZERO * 256 + _ZERO) + 0.5).to(torch.int32)  # cut off, which rounds what is positive
    low_and_high = whole.view(torch.uint8).view(*x.shape, 4)[..., :2].permute(2, 0, 1).reshape(-1, x.shape[1])
    out = _integer_product(low_and_high, packed, scales)
    return torch.add(out[: len(x)], out[len(x) :], alpha=256).mul_(step)


def _integer_product(x: torch.Tensor, packed: Any, scales: torch.Tensor) -> torch.Tensor:
    """`(x - _ZERO) @ codes.T * scales`, float32 [tokens, out]

    :param x: uint8 [tokens, in]
    """
    return torch.ops.onednn.qlinear_pointwise(
        x, 1.0, _ZERO, packed, scales, _zeros(len(scales)), None, 1.0, 0, torch.float32, "none", [], ""
    )


@functools.cache
def _takes_codes(device: torch.device) -> bool:
    """Whether torch's own kernel multiplies with codes there, and rightly."""
    codes = torch.randint(
        -127, 128, (64, 64), dtype=torch.int8, device="cpu", generator=torch.Generator().manual_seed(0)
    )
    x = torch.ones(2, 64, dtype=torch.bfloat16, device=device)
    try:
        scales = torch.ones(64, dtype=torch.bfloat16, device=device)
        got = torch.ops.aten._weight_int8pack_mm(x, codes.to(device), scales)
    except (AttributeError, RuntimeError):
        return False
    expected = codes.float().sum(dim=1)
    return bool(((got.cpu().float() - expected).abs() <= 0.01 * expected.abs() + 1).all())


@functools.cache
def _zeros(outputs: int) -> torch.Tensor:
    """The zero points of the weights."""
    return torch.zeros(outputs, dtype=torch.int32)


@functools.cache
def _has_products() -> bool:
    """Whether oneDNN multiplies 8-bit integers on this processor rightly and fast. On some it does either not so."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-127, 128, (512, 512), dtype=torch.int8, generator=generator)
    x = torch.randint(1, 256, (2, 512), dtype=torch.uint8, generator=generator)
    x[0], codes[0] = 255, 127  # sums of such do not fit into 16 bits
    wide = codes.float()
    try:
        packed = torch.ops.onednn.qlinear_prepack(codes, None)
        right = torch.equal(packed.to_dense().t(), codes) and torch.equal(
            _integer_product(x, packed, torch.ones(512)), (x.float() - _ZERO) @ wide.t()
        )
    except (AttributeError, RuntimeError):
        return False

    def seconds(function: Any) -> float:
        took = []
        for _ in range(_TRIES):
            begun = time.perf_counter()
            function()
            took.append(time.perf_counter() - begun)
        return min(took)

    theirs = seconds(lambda: x.float() @ wide.t())
    return right and seconds(lambda: _integer_product(x, packed, torch.ones(512))) < _TIMES_SLOWER * theirs
