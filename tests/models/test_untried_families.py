"""Families that nobody has tried are tried out when a span is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from families import BLOCKS
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

from lilliput.errors import ModelError, UnsupportedModel
from lilliput.models.sources import resolve
from lilliput.models.span import Span


def load(folder: Path) -> Span:
    return Span.load(resolve(str(folder)), 2, BLOCKS, dtype=torch.float32)


def test_blocks_that_mix_neighbours_are_refused(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a convolution over tokens would."""
    forward = modeling_llama.LlamaMLP.forward
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: forward(self, x.roll(1, dims=1)))
    with pytest.raises(UnsupportedModel, match="neighbours"):
        load(tiny_llama)


def test_a_mask_that_is_not_causal_is_refused(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    causal = modeling_llama.create_causal_mask

    def prefix(**options: object) -> object:
        return causal(**options, or_mask_function=lambda batch, head, query, key: key < 4)

    monkeypatch.setattr(modeling_llama, "create_causal_mask", prefix)
    with pytest.raises(UnsupportedModel, match="neither causal nor a sliding window"):
        load(tiny_llama)


def test_a_checkpoint_that_lacks_tensors_is_refused(tmp_path: Path) -> None:
    config = LlamaConfig(
        num_hidden_layers=BLOCKS,
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
    )
    weights = LlamaForCausalLM(config).state_dict()
    del weights["model.layers.3.mlp.up_proj.weight"]
    LlamaForCausalLM(config).save_pretrained(tmp_path, state_dict=weights)
    assert AutoModelForCausalLM.from_pretrained(tmp_path) is not None  # transformers makes the tensor up
    with pytest.raises(ModelError, match="up_proj"):
        load(tmp_path)
