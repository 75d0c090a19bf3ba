"""A call of a model with holes, as its blocks and its attention see it.

The base model of the family is called as ever, but what it does before its first block and after its last one is not a
span's business: positions, scales and norms of the embedding were applied by the client, the final norm will be. So the
first block that a request names takes the hidden states as they came, and the last one's output is the result.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from lilliput.models import attention, masks
from lilliput.models.attention import AttentionShape, KeyBias
from lilliput.models.batch import PackedBatch
from lilliput.models.lora import Deltas
from lilliput.models.masks import MaskFunction
from lilliput.models.paged_cache import Pools

#: the name under which transformers finds `attend`
ATTENTION = "lilliput_span"


@dataclass
class Trial:
    """A block's inputs and outputs in a trial run."""

    hidden: torch.Tensor
    rotary: Any
    attended: torch.Tensor
    output: Any


@dataclass
class Call:
    """A call in progress through blocks `[start, end)`.

    :ivar hidden: [rows, tokens, hidden], what the first block takes, then what the last one gives
    """

    start: int
    end: int
    hidden: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    batch: PackedBatch | None = None
    pools: Pools = field(default_factory=dict)
    mask: torch.Tensor | None = None
    prompts: torch.Tensor | None = None
    recorded: dict[int, AttentionShape] | None = None
    masks: list[MaskFunction | None] = field(default_factory=list)
    attended: torch.Tensor | None = None
    trials: dict[int, Trial] | None = None
    deltas: Deltas | None = None


# Not a keyword argument of the model's call: some families drop those on the way.
_current: contextvars.ContextVar[Call] = contextvars.ContextVar("lilliput_span_call")


@contextlib.contextmanager
def calling(call: Call) -> Iterator[Call]:
    """While this lasts, blocks and attention work for `call`."""
    token = _current.set(call)
    try:
        yield call
    finally:
        _current.reset(token)


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    key_bias: KeyBias | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """[rows, heads, tokens, dim] -> [rows, tokens, heads, dim], as transformers' attention functions have it.

    :param key_bias: for families that `lilliput.models.families` adapts; transformers has no such argument
    """
    call = _current.get()
    index: int = module.layer_idx  # type: ignore[assignment]
    shape = AttentionShape(
        heads=query.shape[1],
        kv_heads=key.shape[1],
        key_dim=key.shape[-1],
        value_dim=value.shape[-1],
        scaling=scaling if scaling is not None else query.shape[-1] ** -0.5,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
        key_bias=key_bias,
    )
    if call.recorded is not None:
        masks.check(attention_mask, call.masks, sliding_window, query.shape[2])
        call.recorded[index] = shape
    if call.batch is None:
        out = attention.dense(query, key, value, call.mask, shape)
        call.attended = out
        return out, None
    pool, places = call.pools[index], call.batch.places[index]
    attention.write(pool, places, key[0].transpose(0, 1), value[0].transpose(0, 1))
    return attention.paged(query[0].transpose(0, 1), pool, places, shape)[None], None


def _mask(*args: Any, mask_function: MaskFunction | None = None, **kwargs: Any) -> torch.Tensor:
    call = _current.get(None)
    if call is None or call.recorded is None:
        return masks.numbered(0)
    call.masks.append(mask_function)
    return masks.numbered(len(call.masks) - 1)


AttentionInterface.register(ATTENTION, attend)
AttentionMaskInterface.register(ATTENTION, _mask)


class SpanBlock(nn.Module):
    """A family's block inside a span: skipped when the request leaves it out, given its deep prompts."""

    def __init__(self, block: nn.Module, index: int) -> None:
        super().__init__()
        self.block, self.index = block, index
        self.attention_type = getattr(block, "attention_type", None)  # for releases before 5, whose models ask for it
        self._tuples = False

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        call = _current.get()
        if not call.start <= self.index < call.end:
            return (hidden_states,) if self._tuples else hidden_states
        hidden = call.hidden if self.index == call.start else hidden_states
        if call.prompts is not None:
            hidden = hidden + call.prompts[self.index - call.start]
        if call.batch is not None and call.batch.prompts:
            hidden = hidden + packed_prompt(call.batch, self.index - call.start, hidden[0])
        out = self.block(hidden, *args, **kwargs)
        self._tuples = isinstance(out, tuple)
        result = out[0] if self._tuples else out
        if self.index == call.end - 1:
            call.hidden = result
        if call.trials is not None and call.attended is not None:
            call.trials[self.index] = Trial(hidden, kwargs.get("position_embeddings"), call.attended, result)
        return out


def listen(layer: nn.Module, block: int, path: str) -> None:
    """Let a linear layer of a block add what the adapters of each call want."""

    def add(_: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        deltas = _current.get().deltas
        return out if deltas is None else deltas.add(block, path, args[0], out)

    layer.register_forward_hook(add)


def packed_prompt(batch: PackedBatch, block: int, like: torch.Tensor) -> torch.Tensor:
    """The deep prompts of the request's `block`-th block for all tokens of a batch: [tokens, hidden]."""
    total = torch.zeros_like(like)
    for prompts in batch.prompts:
        total[prompts.offset : prompts.offset + prompts.values.shape[1]] = prompts.values[block]
    return total
