"""Falcon, of all three kinds: an attention of its own, with alibi or with rotary positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.models.falcon.modeling_falcon import (
    FALCON_ATTENTION_CLASSES,
    FalconAttention,
    apply_rotary_pos_emb,
    build_alibi_tensor,
)

from lilliput.models.alibi import Alibi
from lilliput.models.call import attend


class SpanFalconAttention(FalconAttention):
    """Over the paged cache."""

    alibi: Alibi | None

    def forward(self, hidden_states: torch.Tensor, *args: Any, position_embeddings: Any = None, **kwargs: Any) -> Any:
        # for each key head its queries, the key, the value: with one key head, with some, and with as many as queries
        heads = self.query_key_value(hidden_states).unflatten(-1, (self.num_kv_heads, -1, self.head_dim))
        query, key, value = heads[..., :-2, :].flatten(2, 3), heads[..., -2, :], heads[..., -1, :]
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        if self.alibi is None:
            query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        attended = attend(self, query, key, value, scaling=self.inv_norm_factor, key_bias=self.alibi)[0]
        return self.dense(attended.flatten(2)), None


def adapt(base: Any, blocks: Sequence[Any]) -> None:
    """Give `blocks` of a span this attention."""
    heads, scaling = base.num_heads, blocks[0].self_attention.inv_norm_factor

    def build(keys: int) -> torch.Tensor:
        ones = torch.ones(1, keys, dtype=torch.int64)
        return build_alibi_tensor(ones, heads, torch.float32) * scaling

    alibi = Alibi(heads, build) if base.use_alibi else None
    for block in blocks:
        block.self_attention.__class__ = SpanFalconAttention  # it keeps its weights
        block.self_attention.alibi = alibi


for name in ("lilliput_span", "lilliput_ends"):  # it looks a class up by the name of its attention
    FALCON_ATTENTION_CLASSES.setdefault(name, FalconAttention)
