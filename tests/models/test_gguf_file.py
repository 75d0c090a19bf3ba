"""GGUF files: their blocks are made when they are asked for, and compute what the model they were made of does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lilliput.errors import ModelError, UnsupportedModel
from lilliput.models.gguf_file import BLOCK_MODULES, END_MODULES
from lilliput.models.sources import resolve
from lilliput.models.span import Span

_SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "head_dim": 16,
    "initializer_range": 0.2,
}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LILLIPUT_CACHE", str(tmp_path / "cache"))


def write(file: Path, model: Any, **more: str) -> None:
    """A model of transformers' as llama.cpp's converter writes it, in float32."""
    c, kind = model.config, model.config.model_type
    writer = gguf.GGUFWriter(file, kind)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_key_length(c.head_dim if kind != "qwen2" else 16)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    for key, value in more.items():
        writer.add_string(key, value)
    theirs = {ours: name for name, ours in [*BLOCK_MODULES.items(), *END_MODULES.items()]}
    for name, tensor in model.state_dict().items():
        module, _, end = name.rpartition(".")
        if module.startswith("model.layers."):
            _, _, block, part = module.split(".", 3)
            if kind == "llama" and part in ("self_attn.q_proj", "self_attn.k_proj"):
                heads = tensor.shape[0] // 16
                tensor = tensor.view(heads, 2, 8, -1).transpose(1, 2).reshape(tensor.shape)
            writer.add_tensor(f"blk.{block}.{theirs[part]}.{end}", tensor.contiguous().numpy())
        else:
            writer.add_tensor(f"{theirs[module]}.{end}", tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def random_model(kind: str) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **_SIZES), dtype=torch.float32)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_its_blocks_compute_what_the_models_do(kind: str, tmp_path: Path) -> None:
    model = random_model(kind)
    write(tmp_path / f"tiny-{kind}.gguf", model)
    files = resolve(str(tmp_path / f"tiny-{kind}.gguf"), weights=False)
    assert files.name == f"tiny-{kind}"
    assert files.facts().blocks[0].matrices == sum(
        p.numel() for p in model.model.layers[0].parameters() if p.dim() == 2
    )
    assert not list(files.path.glob("*.safetensors"))
    files.fetch((1, 3))
    assert len(list(files.path.glob("*.safetensors"))) == 2  # the blocks that were asked for

    model.save_pretrained(tmp_path / "folder")
    span, expected = (Span.load(f, 1, 3, dtype=torch.float32) for f in (files, resolve(str(tmp_path / "folder"))))
    hidden = torch.randn(1, 7, 64)
    assert torch.equal(span.dense(hidden, 1, 3), expected.dense(hidden, 1, 3))

    files.fetch("all")
    whole = AutoModelForCausalLM.from_pretrained(files.path, dtype=torch.float32)
    ids = torch.arange(9)[None]
    assert torch.equal(whole(ids).logits, model(ids).logits)


def test_another_architecture_is_refused_before_anything_else(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "mamba.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match=r"mamba\.gguf holds a mamba model.*llama, qwen2, qwen3"):
        resolve(str(tmp_path / "mamba.gguf"))
    assert not (tmp_path / "cache").exists()


def test_positions_that_are_scaled_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "long.gguf", random_model("llama"), **{"llama.rope.scaling.type": "yarn"})
    with pytest.raises(UnsupportedModel, match="yarn scaling"):
        resolve(str(tmp_path / "long.gguf"))


@pytest.mark.parametrize("size", [100, 100_000])
def test_half_a_file_is_named(size: int, tmp_path: Path) -> None:
    file = tmp_path / "half.gguf"
    write(file, random_model("llama"))
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(ModelError, match=r"half\.gguf is damaged.*Fetch it again"):
        resolve(str(file))
