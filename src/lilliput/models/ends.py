"""A model's ends: embedding, final norm and head. What a client holds."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, PreTrainedModel

from lilliput.models.holes import keep_ends, load_with_holes
from lilliput.models.linear import PackedLinear
from lilliput.models.sources import ModelFiles

ATTENTION = "lilliput_ends"
#: a larger head is not worth its second copy
_PACK_UP_TO_BYTES = 128 << 20


def _no_attention(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("a model's ends have no attention: their blocks are elsewhere")


def _no_mask(*args: Any, **kwargs: Any) -> torch.Tensor:
    """The stand-in for the blocks takes the padding as the caller gave it; transformers need not build masks."""
    return torch.zeros(1, 1, 1, 1, dtype=torch.bool)  # a tensor: mpt converts what it gets


AttentionInterface.register(ATTENTION, _no_attention)
AttentionMaskInterface.register(ATTENTION, _no_mask)


class PackedHead(nn.Module):
    """A head that keeps a second copy of its weight, laid out for the kernel that reads it at every token.

    The first copy is the embedding's, where the two are tied.
    """

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = head.weight, head.bias
        self._packed = PackedLinear(head.weight, head.bias)
        self._made_for = head.weight.data_ptr()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.weight.data_ptr() != self._made_for:  # the model was moved or converted since
            return F.linear(hidden, self.weight, self.bias)
        return self._packed(hidden)


def load_ends(files: ModelFiles, first_block: nn.Module, *, dtype: torch.dtype) -> PreTrainedModel:
    """The causal language model of `files` in which `first_block` stands for all blocks. Raises `ModelError`."""
    model = load_with_holes(
        files, AutoModelForCausalLM, keep_ends(first_block), "ends", dtype=dtype, attention=ATTENTION
    )
    # not the view that it was read through: the tokenizer is found there, too
    model.name_or_path = model.config.name_or_path = str(files.path)
    if getattr(model, "generation_config", None) is not None:
        # a family's choice of cache does not concern us: ours is handed to generate()
        model.generation_config.cache_implementation = None
    head = model.get_output_embeddings()
    if type(head) is nn.Linear and head.weight.nbytes <= _PACK_UP_TO_BYTES:
        model.set_output_embeddings(PackedHead(head))
    return model
