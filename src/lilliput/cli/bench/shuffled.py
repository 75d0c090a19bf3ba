"""The same model with its channels in another order.

Weights that were in groups of 4 bits before, as the demo's were, lose nothing when the same groups are kept in 4 bits
once more. In another order of a model's channels its function is the same, but each group holds numbers of many of the
old ones: what that loses is what other weights lose.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from lilliput.models.checkpoint import INDEX, weight_files
from lilliput.models.sources import ModelFiles, resolve


@contextlib.contextmanager
def shuffled(files: ModelFiles, seed: int = 0) -> Iterator[ModelFiles | None]:
    """A copy of a Llama's files with shuffled channels, while this lasts; None for another family."""
    from safetensors.torch import load_file, save_file

    config = files.config()
    if config.get("model_type") != "llama" or config.get("attention_bias") or config.get("mlp_bias"):
        yield None
        return
    hidden, inner, heads = (int(config[k]) for k in ("hidden_size", "intermediate_size", "num_attention_heads"))
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head = int(config.get("head_dim") or hidden // heads)
    generator = torch.Generator().manual_seed(seed)
    channels, neurons, values = (torch.randperm(n, generator=generator) for n in (hidden, inner, head))

    def of_heads(count: int) -> torch.Tensor:
        """Values are shuffled inside each head, so that all query heads of a key head find them in the same order."""
        return (torch.arange(count)[:, None] * head + values).flatten()

    def moved(name: str, tensor: torch.Tensor) -> torch.Tensor:
        layer = name.split(".")[-2]
        if layer.endswith("norm") or "layernorm" in layer:
            return tensor[channels]
        if layer in ("o_proj", "down_proj"):
            inputs = of_heads(heads) if layer == "o_proj" else neurons
            return tensor[channels][:, inputs]
        tensor = tensor[:, channels]
        if layer in ("gate_proj", "up_proj"):
            return tensor[neurons]
        return tensor[of_heads(kv_heads)] if layer == "v_proj" else tensor

    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / files.name
        folder.mkdir()
        names = weight_files(files.path)
        for file in files.path.iterdir():
            if file.name == INDEX or file.suffix == ".json" or file.name.startswith("tokenizer"):
                shutil.copy(file, folder)
        for file_name in names:
            tensors = load_file(files.path / file_name)
            save_file(
                {name: moved(name, tensor).contiguous() for name, tensor in tensors.items()},
                folder / file_name,
                metadata={"format": "pt"},
            )
        yield resolve(str(folder))
