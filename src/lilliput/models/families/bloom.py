"""BLOOM: alibi, and an attention of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.models.bloom.modeling_bloom import BloomAttention, build_alibi_tensor

from lilliput.models.alibi import Alibi
from lilliput.models.call import attend


class SpanBloomAttention(BloomAttention):
    """Over the paged cache."""

    alibi: Alibi

    def forward(self, hidden_states: torch.Tensor, residual: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        heads = self.query_key_value(hidden_states).unflatten(-1, (self.num_heads, 3, self.head_dim))
        query, key, value = heads.permute(3, 0, 2, 1, 4)
        attended = attend(self, query, key, value, scaling=self.inv_norm_factor, key_bias=self.alibi)[0]
        return self.dense(attended.flatten(2)) + residual, None


def adapt(base: Any, blocks: Sequence[Any]) -> None:
    """Give `blocks` of a span this attention."""
    heads = base.num_heads
    alibi = Alibi(heads, lambda keys: build_alibi_tensor(torch.ones(1, keys), heads, torch.float32))
    for block in blocks:
        block.self_attention.__class__ = SpanBloomAttention  # it keeps its weights
        block.self_attention.alibi = alibi
