"""A model's ends: embedding, final norm and head. What a client holds."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, PreTrainedModel

from lilliput.models.holes import keep_ends, load_with_holes
from lilliput.models.sources import ModelFiles

ATTENTION = "lilliput_ends"


def _no_attention(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("a model's ends have no attention: their blocks are elsewhere")


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """The stand-in for the blocks takes the padding as the caller gave it; transformers need not build masks."""


AttentionInterface.register(ATTENTION, _no_attention)
AttentionMaskInterface.register(ATTENTION, _no_mask)


def load_ends(files: ModelFiles, first_block: nn.Module, *, dtype: torch.dtype) -> PreTrainedModel:
    """The causal language model of `files` in which `first_block` stands for all blocks. Raises `ModelError`."""
    model = load_with_holes(files, AutoModelForCausalLM, keep_ends(first_block), dtype=dtype, attention=ATTENTION)
    if getattr(model, "generation_config", None) is not None:
        # a family's choice of cache does not concern us: ours is handed to generate()
        model.generation_config.cache_implementation = None
    return model
