"""Experts in fewer bits.

transformers keeps the experts of a block as one tensor each for what comes in and what goes out, and says in a few
attributes how a family's are laid out (`has_gate`, `has_bias`, `is_transposed`): its own implementations of experts go
by those, whatever the family. In fewer bits each expert is two layers of codes; only those that a token has chosen are
read. Families, and releases, whose experts are modules of linear layers need nothing of this.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lilliput.models.memory import forget
from lilliput.models.quantized_linear import QuantizedLinear


class QuantizedExperts(nn.Module):
    """Stands for a family's experts.

    :param family: the experts as transformers has them; they lose their weights, and keep their gate and activation
    """

    def __init__(self, family: Any, kind: type[QuantizedLinear]) -> None:
        super().__init__()
        self.family = family
        weights = expert_weights(family)
        assert weights is not None
        into, out_of = _names(family)
        self._into = self._layers(into, weights.pop(0).detach(), kind)  # and frees them
        self._out_of = self._layers(out_of, weights.pop().detach(), kind)

    def _layers(self, name: str, weight: torch.Tensor, kind: type[QuantizedLinear]) -> list[QuantizedLinear]:
        biases = getattr(self.family, f"{name}_bias").detach().clone() if self.family.has_bias else [None] * len(weight)
        layers = [kind.of(one, bias) for one, bias in zip(weight, biases, strict=True)]
        for parameter in (name, f"{name}_bias") if self.family.has_bias else (name,):
            delattr(self.family, parameter)
        forget(weight)
        return layers

    @property
    def layers(self) -> list[QuantizedLinear]:
        """Of all experts: from hidden states, then back to them."""
        return [*self._into, *self._out_of]

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]

        :param chosen: numbers of the experts that each token has chosen [tokens, choices]
        :param shares: how much each of them counts, of the same shape
        """
        family = self.family
        out = torch.zeros_like(hidden)
        for expert in chosen.unique().tolist():
            token, choice = torch.where(chosen == expert)
            inner = self._into[expert](hidden[token])
            inner = family._apply_gate(inner) if family.has_gate else family.act_fn(inner)
            result = self._out_of[expert](inner)
            if getattr(family, "has_post_expert_norm", False):
                result = family.post_expert_norm(result)
            out.index_add_(0, token, (result * shares[token, choice, None]).to(out.dtype))
        return out


def expert_weights(module: Any) -> list[torch.Tensor] | None:
    """[experts, out, in] for what comes in and what goes out; None if these are no experts, or laid out otherwise."""
    if not all(hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed", "_apply_gate")):
        return None
    weights = [getattr(module, name, None) for name in _names(module)]
    tensors = [weight for weight in weights if isinstance(weight, torch.Tensor) and weight.dim() == 3]
    if len(tensors) < len(weights):
        return None
    return [tensor.transpose(1, 2) if module.is_transposed else tensor for tensor in tensors]


def _names(family: Any) -> tuple[str, str]:
    return ("gate_up_proj" if family.has_gate else "up_proj"), "down_proj"
