"""A block's weights in fewer bits: which of its layers are quantized, and what stands in their place.

Layers whose shapes no kernel takes stay as they are, and so do norms, embeddings, and the routers of experts: those are
small, and what they decide is not a little wrong but another expert.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import transformers
from torch import nn
from transformers.pytorch_utils import Conv1D

from lilliput.errors import ModelError, UnsupportedModel
from lilliput.models.experts import QuantizedExperts, expert_weights
from lilliput.models.facts import ROUTERS, can_quantize
from lilliput.models.int4_linear import Int4Linear
from lilliput.models.int8_linear import Int8Linear
from lilliput.models.memory import forget
from lilliput.models.nf4_linear import Nf4Linear
from lilliput.models.quantized_linear import QuantizedLinear

_KINDS: dict[str, type[QuantizedLinear]] = {"int8": Int8Linear, "int4": Int4Linear, "nf4": Nf4Linear}
KINDS = tuple(_KINDS)


class QuantizedModule(nn.Module):
    """Stands for a linear layer in a family's block."""

    def __init__(self, layer: QuantizedLinear) -> None:
        super().__init__()
        self.layer = layer
        self.in_features, self.out_features = layer.in_features, layer.out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def check(kind: str | None, device: torch.device) -> None:
    """Raise `ModelError` for a quantization that does not exist, or not on this device."""
    if kind is None:
        return
    if kind not in _KINDS:
        raise ModelError(f"unknown quantization {kind!r}; known are {', '.join(_KINDS)}")
    _KINDS[kind].check(device)


def is_here(kind: str | None, device: torch.device) -> bool:
    """Whether `check` says nothing against it."""
    try:
        check(kind, device)
    except ModelError:
        return False
    return True


def quantize(block: nn.Module, kind: str) -> None:
    """Replace a block's linear layers and experts by quantized ones, where a kernel takes their shape.

    Raises `UnsupportedModel` for experts whose layout is not understood.
    """
    make = _KINDS[kind]
    for owner in list(block.modules()):
        for name, child in list(owner.named_children()):
            if _are_experts(child):
                setattr(owner, name, QuantizedExperts(child, make))
            weight = _weight(child)
            if weight is not None and name not in ROUTERS and can_quantize(*weight.shape):
                bias = getattr(child, "bias", None)
                layer = make.of(weight.detach(), None if bias is None else bias.detach().clone())
                setattr(owner, name, QuantizedModule(layer))
                forget(weight)
                del child.weight, weight  # now, and not when the whole block is done
    for module in block.modules():
        large = [name for name, parameter in module.named_parameters(recurse=False) if parameter.dim() > 2]
        if large and expert_weights(module) is None:
            raise UnsupportedModel(
                f"{type(module).__name__} cannot be kept in {kind} with transformers {transformers.__version__}: "
                f"how it computes with {large[0]} is not understood. Serve the model without --quantize."
            )


def _are_experts(module: nn.Module) -> bool:
    """Whether they are such as can be quantized."""
    weights = expert_weights(module)
    return weights is not None and all(can_quantize(*weight.shape[1:]) for weight in weights)


def _weight(module: nn.Module) -> torch.Tensor | None:
    """A linear layer's weight [out, in], or None for other modules."""
    if type(module) is nn.Linear or (type(module).__name__ == "FalconLinear" and isinstance(module, nn.Linear)):
        return module.weight
    return module.weight.t() if isinstance(module, Conv1D) else None


def joined(modules: Sequence[QuantizedModule]) -> QuantizedLinear:
    """Quantized modules of the same input as one layer, which is taken away from them."""
    layers = [module.layer for module in modules]
    for module in modules:
        del module.layer
    return layers[0] if len(layers) == 1 else type(layers[0]).joined(layers)
