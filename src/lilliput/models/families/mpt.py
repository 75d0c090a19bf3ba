"""MPT: alibi, and an attention of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.models.mpt.modeling_mpt import MptAttention, build_mpt_alibi_tensor

from lilliput.models.alibi import Alibi
from lilliput.models.call import attend


class SpanMptAttention(MptAttention):
    """Over the paged cache."""

    alibi: Alibi

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        joined = self.Wqkv(hidden_states)
        if self.clip_qkv:
            joined = joined.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        query, key, value = joined.unflatten(-1, (3, self.n_heads, self.head_dim)).permute(2, 0, 3, 1, 4)
        attended = attend(self, query, key, value, scaling=self.softmax_scale, key_bias=self.alibi)[0]
        return self.out_proj(attended.flatten(2)), None


def adapt(base: Any, blocks: Sequence[Any]) -> None:
    """Give `blocks` of a span this attention."""
    alibi = Alibi(base.num_heads, lambda keys: build_mpt_alibi_tensor(base.num_heads, keys))
    for block in blocks:
        block.attn.__class__ = SpanMptAttention  # it keeps its weights
        block.attn.alibi = alibi
