"""A model as its config.json describes it, before any of its weights are read: its sizes, and a block to measure."""

from __future__ import annotations

import copy

import torch
from transformers import AutoModel

from lilliput.errors import ModelError
from lilliput.models.call import ATTENTION
from lilliput.models.facts import ModelFacts, describe
from lilliput.models.families import family_of
from lilliput.models.holes import building, keep_span, read_config
from lilliput.models.sources import ModelFiles
from lilliput.models.span import Span

#: every weight; zeros would be read from one and the same page of memory
_WEIGHT = 0.01


def facts_of(files: ModelFiles) -> ModelFacts:
    """A model's sizes. Raises `ModelError`."""
    config = read_config(files)
    family_of(config)
    try:
        with building(), torch.device("meta"):
            model = AutoModel.from_config(config)
    except (ValueError, KeyError, ImportError, AttributeError) as e:
        raise ModelError(f"transformers cannot build {files.name}: {e}") from e
    shapes = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    return describe(files.name, config.to_dict(), shapes)


def sample_span(files: ModelFiles, *, dtype: torch.dtype) -> Span:
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
    model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.data.fill_(_WEIGHT)
        else:
            tensor.data.zero_()
    return Span(model.eval().requires_grad_(False), 0, 1)
