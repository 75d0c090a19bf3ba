"""A block as a model's config.json describes it, to be measured before any weights are read."""

from __future__ import annotations

import copy

import torch
from transformers import AutoModel

from lilliput.models import quantization
from lilliput.models.call import ATTENTION
from lilliput.models.families import family_of
from lilliput.models.holes import blocks_of, building, keep_span, read_config
from lilliput.models.sources import ModelFiles
from lilliput.models.span import CPU, Span

#: every weight; zeros would be read from one and the same page of memory
_WEIGHT = 0.01


def sample_span(
    files: ModelFiles, *, dtype: torch.dtype, quantize: str | None = None, device: torch.device = CPU
) -> Span:
    """A span of the model's first block as its config.json describes it. Only that file is read.

    Raises `ModelError`, or whatever a family's code stumbles over.
    """
    config = copy.deepcopy(read_config(files))
    config.num_hidden_layers = 1
    for name, value in config.to_dict().items():  # what is told for each layer
        if name.startswith("layer") and isinstance(value, list):
            setattr(config, name, value[:1])
    family_of(config)
    with building(), torch.device("meta"):
        model = AutoModel.from_config(config, dtype=dtype, attn_implementation=ATTENTION)
    keep_span(0, 1)(model)
    model.to_empty(device=device)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.data.fill_(_WEIGHT)
        else:
            tensor.data.zero_()
    if quantize is not None:
        quantization.quantize(blocks_of(model)[0], quantize)
    return Span(model.eval().requires_grad_(False), 0, 1, device=device)
