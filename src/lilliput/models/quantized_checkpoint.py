"""Checkpoints that keep their weights in fewer bits already: GPTQ, AWQ, FP8 and MXFP4.

Each is read as the numbers that its codes stand for, part by part as blocks are loaded; `--quantize` then keeps those
in few bits again. So no method's own package is needed, and no GPU. Importing this module is cheap.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lilliput.errors import ModelError
from lilliput.models import checkpoint
from lilliput.models.checkpoint import Part, Shapes
from lilliput.models.facts import text_config

if TYPE_CHECKING:
    import torch

#: what the 4 bits of an MXFP4 number stand for; the highest is the sign
_MXFP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MXFP4_BIAS = 127
#: in AWQ's words of 32 bits, where each of eight neighbours lies
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
_GPTQ_BITS = (2, 4, 8)

Parts = Mapping[str, "torch.Tensor"]
T = TypeVar("T")


@dataclass(frozen=True)
class Method:
    """One way to keep a tensor.

    :ivar endings: of the names of what a tensor is kept as. Where the first two are there, all are this tensor's.
    :ivar ending: of the tensor's own name
    :ivar shape: the tensor's, from theirs
    :ivar widen: the tensor, from theirs and the checkpoint's `quantization_config`, in the given dtype
    :ivar objection: what about a `quantization_config` stands in the way, or None
    """

    endings: tuple[str, ...]
    ending: str
    shape: Callable[[Mapping[str, tuple[int, ...]]], tuple[int, ...]]
    widen: Callable[[Parts, Mapping[str, Any], torch.dtype], torch.Tensor]
    objection: Callable[[Mapping[str, Any]], str | None] = lambda config: None


def objection(config: Mapping[str, Any]) -> str | None:
    """Why the weights of a model with this config.json cannot be read; None if they can."""
    how = _how(config)
    if how is None:
        return None
    name = _name(how)
    if name not in METHODS:
        return (
            f"its weights are quantized with {name or 'a method that it does not name'}, which is not read here. Take "
            f"the model in 16 bits, or as GGUF, {', '.join(sorted(METHODS)).upper()}; `--quantize` makes it small again"
        )
    against = METHODS[name].objection(how)
    return against and f"its weights are quantized with {name}, {against}"


def plain_shapes(config: Mapping[str, Any], shapes: Shapes) -> Shapes:
    """The shapes of the tensors that these stand for, by their own names."""
    how = _how(config)
    if how is None:
        return shapes
    method = METHODS[_name(how)]
    kept, plain = _sorted(method, shapes)
    return plain | {name: method.shape(parts) for name, parts in kept.items()}


def read(config: Mapping[str, Any], folder: Path, part: Part, dtype: torch.dtype) -> dict[str, torch.Tensor] | None:
    """The part's tensors, those in fewer bits in `dtype`; None if this is a checkpoint like any other.

    Raises `ModelError`.
    """
    how = _how(config)
    if how is None:
        return None
    import torch
    from safetensors import safe_open

    method = METHODS[_name(how)]
    tensors: dict[str, torch.Tensor] = {}
    names = checkpoint.tensors_of(folder, part)
    for file in sorted(set(names.values())):
        with safe_open(folder / file, framework="pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in names if names[name] == file}
    kept, plain = _sorted(method, tensors)
    for name, tensor in plain.items():  # what lacks its scales would be taken for the weights themselves
        if tensor.dtype.itemsize == 1 or tensor.dtype == torch.int32:
            raise ModelError(
                f"{folder} keeps {name} as {tensor.dtype} and none of what {_name(how)} as known here has beside it. "
                f"Take the model in 16 bits, or as GGUF"
            )
    for name in list(kept):
        try:
            plain[name] = method.widen(kept.pop(name), how, dtype)
        except (RuntimeError, KeyError, IndexError) as e:
            raise ModelError(f"{folder} keeps {name} in a way that is not {_name(how)}'s as known here: {e}") from e
    return plain


def _how(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    found = text_config(config).get("quantization_config")
    return found if isinstance(found, dict) else None


def _name(how: Mapping[str, Any]) -> str:
    return str(how.get("quant_method") or "").lower()


def _sorted(method: Method, tensors: Mapping[str, T]) -> tuple[dict[str, dict[str, T]], dict[str, T]]:
    """What is kept in fewer bits, by the tensor's own name and then by ending, and what is not."""
    first, second, *_ = method.endings
    kept: dict[str, dict[str, T]] = {}
    taken = set()
    for name in tensors:
        stem = name.removesuffix(first)
        if stem != name and stem + second in tensors:
            parts = {ending: stem + ending for ending in method.endings if stem + ending in tensors}
            kept[stem + method.ending] = {ending: tensors[full] for ending, full in parts.items()}
            taken |= set(parts.values())
    return kept, {name: value for name, value in tensors.items() if name not in taken}


def _codes(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [rows, words] -> int32 [rows, words * 32 / bits]: from the lowest bits of each word to its highest."""
    import torch

    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return (words[..., None] >> shifts & (1 << bits) - 1).flatten(1)


def _gptq(parts: Parts, how: Mapping[str, Any], dtype: torch.dtype) -> torch.Tensor:
    """Words hold neighbouring inputs, and for zeros outputs: `(code - zero) * scale`, by the group of an input."""
    import torch

    scales, zero_words = parts[".scales"], parts[".qzeros"]
    bits = 32 * zero_words.shape[1] // scales.shape[1]
    codes = _codes(parts[".qweight"].t().contiguous(), bits)  # [out, in]
    # what most releases write is one less than the zero
    zeros = _codes(zero_words, bits) + (0 if how.get("checkpoint_format") == "gptq_v2" else 1) & (1 << bits) - 1
    group = parts.get(".g_idx")
    if group is None:
        group = torch.arange(codes.shape[1]) // (codes.shape[1] // len(scales))
    group = group.long()
    return ((codes - zeros.t()[:, group]) * scales.float().t()[:, group]).to(dtype)


def _gptq_shape(shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    outputs = shapes[".scales"][1]
    return outputs, shapes[".qweight"][0] * outputs // shapes[".qzeros"][1]


def _gptq_objection(how: Mapping[str, Any]) -> str | None:
    bits = how.get("bits")
    return None if bits in _GPTQ_BITS else f"in {bits} bits, where {', '.join(map(str, _GPTQ_BITS))} are read"


def _awq(parts: Parts, how: Mapping[str, Any], dtype: torch.dtype) -> torch.Tensor:
    """Words hold neighbouring outputs: `(code - zero) * scale`, by groups of inputs."""
    codes, zeros = (
        _codes(parts[name], 4).unflatten(1, (-1, 8))[..., _AWQ_ORDER].flatten(1) for name in (".qweight", ".qzeros")
    )
    scales = parts[".scales"].float()
    each = len(codes) // len(scales)
    wide = (codes - zeros.repeat_interleave(each, dim=0)) * scales.repeat_interleave(each, dim=0)
    return wide.t().to(dtype).contiguous()


def _awq_objection(how: Mapping[str, Any]) -> str | None:
    version = str(how.get("version") or "gemm").lower()
    if version != "gemm":
        return f"in its version {version}, where gemm is read"
    return None if how.get("bits", 4) == 4 else f"in {how.get('bits')} bits, where 4 are read"


def _fp8(parts: Parts, how: Mapping[str, Any], dtype: torch.dtype) -> torch.Tensor:
    """Numbers of 8 bits, with a scale for each block of them (DeepSeek-V3's form), or one for all."""
    weight, scale = parts[".weight"].float(), parts[".weight_scale_inv"].float()
    if scale.numel() == 1:
        return (weight * scale.flatten()).to(dtype)
    for dim, size in enumerate(how.get("weight_block_size") or (128, 128)):
        scale = scale.repeat_interleave(int(size), dim=dim).narrow(dim, 0, weight.shape[dim])
    return (weight * scale).to(dtype)


def _mxfp4(parts: Parts, how: Mapping[str, Any], dtype: torch.dtype) -> torch.Tensor:
    """Experts [experts, in, out]; their codes lie by outputs, 32 inputs in 16 bytes with one power of two."""
    import torch

    blocks, powers = parts["_blocks"], parts["_scales"]
    experts, outputs, groups, half = blocks.shape
    table = torch.tensor([*_MXFP4, *(-number for number in _MXFP4)])
    out = torch.empty(experts, groups * half * 2, outputs, dtype=dtype)
    for expert in range(experts):  # all at once would be four times as large as what comes out
        codes = torch.stack([blocks[expert] & 15, blocks[expert] >> 4], dim=-1).flatten(2)
        wide = torch.ldexp(table[codes.int()], powers[expert].int()[..., None] - _MXFP4_BIAS)
        out[expert] = wide.flatten(1).t()
    return out


def _mxfp4_shape(shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    experts, outputs, groups, half = shapes["_blocks"]
    return experts, groups * half * 2, outputs


#: by the name that config.json has for them
METHODS = {
    "gptq": Method((".qweight", ".scales", ".qzeros", ".g_idx"), ".weight", _gptq_shape, _gptq, _gptq_objection),
    "awq": Method(
        (".qweight", ".scales", ".qzeros"),
        ".weight",
        lambda shapes: (shapes[".scales"][1], shapes[".qweight"][0]),
        _awq,
        _awq_objection,
    ),
    "fp8": Method((".weight", ".weight_scale_inv"), ".weight", lambda shapes: shapes[".weight"], _fp8),
    "mxfp4": Method(("_blocks", "_scales"), "", _mxfp4_shape, _mxfp4),
}
