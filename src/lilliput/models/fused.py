"""A Llama-shaped block as few, large operations.

Half of a single-token step in plain modules is neither weights nor attention but the hundreds of small operations
between them. This is the same block with its projections joined, its residuals, gate and activation inside the matrix
kernels, and its attention over the paged cache.

It is not a list of families: any block with the shape below is tried, run beside the family's own code on the same
inputs, and used only if the outputs agree (see `Span`). A family, or a release of transformers, that computes something
else simply keeps its own code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from lilliput.models import attention, quantization
from lilliput.models.attention import AttentionShape
from lilliput.models.batch import Places
from lilliput.models.linear import FrozenLinear, PackedLinear
from lilliput.models.lora import Deltas
from lilliput.models.memory import forget
from lilliput.models.quantization import QuantizedModule

Rotary = tuple[torch.Tensor, torch.Tensor]


class RMSNorm:
    """x / rms(x) * weight, over the last dimension."""

    def __init__(self, module: Any) -> None:
        self.weight: torch.Tensor = module.weight.detach().clone()  # else the file it is in would stay mapped
        self.eps = float(getattr(module, "variance_epsilon", getattr(module, "eps", 1e-6)))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def rotary_tables(cos: torch.Tensor, sin: torch.Tensor) -> Rotary:
    """From a family's `cos, sin` [..., dim] to tables for `rotate`: the sign of the swapped half goes into the sine."""
    half = sin.shape[-1] // 2
    return cos[..., None, :], torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)[..., None, :]


def rotate(x: torch.Tensor, tables: Rotary) -> torch.Tensor:
    """Rotary positions for heads [..., heads, dim], halves swapped (not interleaved)."""
    cos, sin = tables
    return torch.addcmul(x * cos, torch.roll(x, x.shape[-1] // 2, dims=-1), sin)


class LooseLinear(FrozenLinear):
    """A layer as the family keeps it, or several of the same input as one with their outputs side by side.

    :param parts: all `nn.Linear`, or all `QuantizedModule`
    """

    def __init__(self, parts: Sequence[Any]) -> None:
        self._parts = list(parts)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([part(x) for part in self._parts], dim=-1)

    def backward(self, grad: torch.Tensor) -> torch.Tensor:
        parts = zip(self._parts, grad.split([part.out_features for part in self._parts], dim=-1), strict=True)
        return torch.stack(
            [part.layer.backward(g) if type(part) is QuantizedModule else g @ part.weight for part, g in parts]
        ).sum(dim=0)

    def packed(self) -> FrozenLinear:
        """The family's modules lose their weights: both would not fit."""
        parts, self._parts = self._parts, []
        if type(parts[0]) is QuantizedModule:
            made: FrozenLinear = quantization.joined(parts)
        else:
            made = PackedLinear.joined(*parts)
            for part in parts:
                forget(part.weight)
                del part.weight
        return made


class FusedBlock:
    """One block. It computes with the family's own weights, until `pack` takes them away from there."""

    def __init__(self, block: nn.Module, shape: AttentionShape, index: int) -> None:
        attn, mlp = _part(block, "self_attn"), _part(block, "mlp")
        self.shape, self.index = shape, index
        self.norm_in = RMSNorm(_part(block, "input_layernorm"))
        self.norm_mlp = RMSNorm(_part(block, "post_attention_layernorm"))
        self.qkv = _linear(attn, "q_proj", "k_proj", "v_proj")
        self.out = _linear(attn, "o_proj")
        self.down = _linear(mlp, "down_proj")
        #: two layers, whose kernels also apply the activation and the gate; or one, if kernels of codes read both
        self.gate_up = [_linear(mlp, "gate_proj"), _linear(mlp, "up_proj")]
        if type(mlp.gate_proj) is QuantizedModule:
            self.gate_up = [_linear(mlp, "gate_proj", "up_proj")]
        self.norm_q = RMSNorm(attn.q_norm) if hasattr(attn, "q_norm") else None
        self.norm_k = RMSNorm(attn.k_norm) if hasattr(attn, "k_norm") else None

    def pack(self) -> None:
        """Lay the weights out for the kernels that read them, one after the other, each freed in the family's block."""
        self.qkv, self.out = self.qkv.packed(), self.out.packed()
        self.gate_up = [layer.packed() for layer in self.gate_up]
        self.down = self.down.packed()

    def paged(
        self,
        hidden: torch.Tensor,
        tables: Rotary,
        pool: torch.Tensor,
        places: Places,
        prompt: torch.Tensor | None,
        deltas: Deltas | None = None,
    ) -> torch.Tensor:
        """Packed tokens with a paged cache: [tokens, hidden] -> [tokens, hidden]. Not differentiable."""
        if prompt is not None:
            hidden = hidden + prompt
        tokens, shape = hidden.shape[0], self.shape
        heads = self._heads(self.norm_in(hidden), deltas).view(tokens, -1, shape.key_dim)
        turning = heads[:, : shape.heads + shape.kv_heads]
        if self.norm_q is None:
            cos, sin = tables
            rolled = torch.roll(turning, shape.key_dim // 2, dims=-1)
            torch.addcmul(turning * cos, rolled, sin, out=turning)  # in place: keys stay beside values
        else:
            turning.copy_(rotate(self._norm_heads(turning), tables))
        attention.write_joined(pool, places, heads[:, shape.heads :])
        attended = attention.paged(heads[:, : shape.heads], pool, places, shape)
        return self._after(attended.reshape(tokens, -1), hidden, deltas)

    def dense(
        self, hidden: torch.Tensor, tables: Rotary, mask: torch.Tensor | None, deltas: Deltas | None = None
    ) -> torch.Tensor:
        """Rows without a cache, differentiable: [rows, tokens, hidden] -> the same shape."""
        return self._after(self.attend(hidden, tables, mask, deltas), hidden, deltas)

    def attend(
        self, hidden: torch.Tensor, tables: Rotary, mask: torch.Tensor | None, deltas: Deltas | None = None
    ) -> torch.Tensor:
        """The attention of `dense`, before its output projection: [rows, tokens, heads * value_dim]."""
        rows, tokens, _ = hidden.shape
        shape = self.shape
        heads = self._heads(self.norm_in(hidden), deltas).view(rows, tokens, -1, shape.key_dim)
        turning = heads[:, :, : shape.heads + shape.kv_heads]
        if self.norm_q is not None:
            turning = self._norm_heads(turning)
        turning = rotate(turning, tables)
        query, key = turning.transpose(1, 2).split([shape.heads, shape.kv_heads], dim=1)
        value = heads[:, :, shape.heads + shape.kv_heads :].transpose(1, 2)
        return attention.dense(query, key, value, mask, shape).reshape(rows, tokens, -1)

    def _heads(self, normed: torch.Tensor, deltas: Deltas | None) -> torch.Tensor:
        """Queries, keys and values, side by side."""
        heads = self.qkv(normed)
        if deltas is not None:
            first = 0
            for name, count in (("q", self.shape.heads), ("k", self.shape.kv_heads), ("v", self.shape.kv_heads)):
                heads = deltas.add(self.index, f"self_attn.{name}_proj", normed, heads, first)
                first += count * self.shape.key_dim
        return heads

    def _after(self, attended: torch.Tensor, hidden: torch.Tensor, deltas: Deltas | None) -> torch.Tensor:
        """What follows attention: its projection, the MLP, and both residuals."""
        after = self.out.plus(attended, hidden)
        if deltas is not None:
            after = deltas.add(self.index, "self_attn.o_proj", attended, after)
        inner = self._inner(self.norm_mlp(after), deltas)
        out = self.down.plus(inner, after)
        return out if deltas is None else deltas.add(self.index, "mlp.down_proj", inner, out)

    def _inner(self, normed: torch.Tensor, deltas: Deltas | None) -> torch.Tensor:
        """silu(gate) * up"""
        if len(self.gate_up) == 2 and deltas is None:
            gate, up = self.gate_up
            return up.times(normed, gate.silu(normed))
        outs = [layer(normed) for layer in self.gate_up]
        if deltas is not None:
            outs[0] = deltas.add(self.index, "mlp.gate_proj", normed, outs[0])
            first = 0 if len(outs) == 2 else outs[0].shape[-1] // 2
            outs[-1] = deltas.add(self.index, "mlp.up_proj", normed, outs[-1], first)
        gated, upward = outs if len(outs) == 2 else outs[0].chunk(2, dim=-1)
        return F.silu(gated) * upward

    def _norm_heads(self, turning: torch.Tensor) -> torch.Tensor:
        query, key = turning.split([self.shape.heads, self.shape.kv_heads], dim=-2)
        assert self.norm_q is not None
        assert self.norm_k is not None
        return torch.cat([self.norm_q(query), self.norm_k(key)], dim=-2)


class NotLlamaShaped(Exception):
    """The block has other parts than `FusedBlock` knows."""


_BLOCK_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"}
_MLP_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}


def try_fuse(block: nn.Module, shape: AttentionShape, activation: str, index: int) -> FusedBlock | None:
    """The block as a `FusedBlock`, or None if it has other parts. Whether it computes the same, the caller must try."""
    try:
        if not shape.plain or shape.key_dim != shape.value_dim or activation not in ("silu", "swish"):
            return None
        for owner, known in (
            (block, _BLOCK_PARTS),
            (_part(block, "self_attn"), _ATTENTION_PARTS),
            (_part(block, "mlp"), _MLP_PARTS),
        ):
            # parts without weights (dropout, activations) are not weighed: the trial run notices if they matter
            others = {
                n for n, child in owner.named_children() if n not in known and any(True for _ in child.parameters())
            }
            if others:
                return None
        return FusedBlock(block, shape, index)
    except NotLlamaShaped:
        return None


def _part(owner: nn.Module, name: str) -> Any:
    part = getattr(owner, name, None)
    if not isinstance(part, nn.Module):
        raise NotLlamaShaped(name)
    return part


def _linear(owner: nn.Module, *names: str) -> FrozenLinear:
    parts = [_part(owner, name) for name in names]
    if {type(part) for part in parts} in ({nn.Linear}, {QuantizedModule}):
        return LooseLinear(parts)
    raise NotLlamaShaped(", ".join(names))  # perhaps some are quantized, and some have shapes that cannot be
