"""What a low-rank adapter adds to the linear layers of a span, for the tokens that ask for it.

A layer's output becomes `base(x) + scaling * B(A(x))` (LoRA, https://arxiv.org/abs/2106.09685). The base product is
computed once for all tokens of a batch, whatever adapters they use, and each adapter adds to its own tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from lilliput.models.linear import PackedLinear


class LowRank:
    """`scaling * B(A(x))` for one linear layer, differentiable in `x`.

    :param a: [rank, in]
    :param b: [out, rank]
    """

    def __init__(self, a: torch.Tensor, b: torch.Tensor, scaling: float, dtype: torch.dtype) -> None:
        self.out_features = b.shape[0]
        self._a = PackedLinear(a.to(dtype))
        self._b = PackedLinear((b.float() * scaling).to(dtype))
        self.nbytes = (a.numel() + b.numel()) * dtype.itemsize

    def to(self, device: torch.device) -> None:
        self._a, self._b = self._a.to(device), self._b.to(device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]"""
        return self._b(self._a(x))


@dataclass(frozen=True)
class Adapter:
    """One adapter, as far as it concerns a span.

    :ivar layers: by block number, then by the layer's path inside its block (`self_attn.q_proj`)
    """

    name: str
    layers: Mapping[int, Mapping[str, LowRank]]

    def to(self, device: torch.device) -> None:
        for block in self.layers.values():
            for layer in block.values():
                layer.to(device)

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for block in self.layers.values() for layer in block.values())


@dataclass(frozen=True)
class Deltas:
    """Which tokens of a call use which adapter.

    :ivar parts: adapters, each with the places of its tokens among those of the call (int64); None: all of them
    """

    parts: tuple[tuple[Adapter, torch.Tensor | None], ...]

    def add(self, block: int, path: str, x: torch.Tensor, out: torch.Tensor, first: int = 0) -> torch.Tensor:
        """What a layer's output becomes; with gradients a new tensor, else the same one.

        :param x: the layer's input, [..., tokens, in]
        :param out: its output [..., tokens, out], or that of several layers side by side
        :param first: column of `out` where this layer's output begins
        """
        for adapter, places in self.parts:
            layer = adapter.layers.get(block, {}).get(path)
            if layer is None:
                continue
            if places is None:
                out = _add(out, layer(x), first)
            else:  # only rounds of inference mix adapters, and those have no gradients
                flat = out.view(-1, out.shape[-1])[:, first : first + layer.out_features]
                flat.index_add_(0, places, layer(x.reshape(-1, x.shape[-1]).index_select(0, places)))
        return out


def _add(out: torch.Tensor, delta: torch.Tensor, first: int) -> torch.Tensor:
    delta = delta.view(*out.shape[:-1], -1)
    if out.shape == delta.shape:
        return out + delta if delta.requires_grad else out.add_(delta)
    if delta.requires_grad:
        return torch.cat(
            [
                out[..., :first],
                out[..., first : first + delta.shape[-1]] + delta,
                out[..., first + delta.shape[-1] :],
            ],
            dim=-1,
        )
    out[..., first : first + delta.shape[-1]] += delta
    return out


def deltas_of(adapters: Iterable[tuple[Adapter, torch.Tensor | None]]) -> Deltas | None:
    """None if no token uses one: then nothing is spent on them."""
    parts = tuple(adapters)
    return Deltas(parts) if parts else None
