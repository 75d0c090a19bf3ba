"""Models with holes, made from files."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch.nn import Identity
from transformers import LlamaConfig, LlamaForCausalLM

from lilliput.models.ends import load_ends
from lilliput.models.sources import resolve
from lilliput.models.span import Span


def test_several_threads_may_load_at_once(tmp_path: Path) -> None:
    config = LlamaConfig(
        num_hidden_layers=4,
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "tied")
    files = resolve(str(tmp_path / "tied"))

    def load(number: int) -> None:
        if number % 2:
            load_ends(files, Identity(), dtype=torch.float32)
        else:
            Span.load(files, 0, 4, dtype=torch.float32)

    with ThreadPoolExecutor(4) as threads:
        for loaded in [threads.submit(load, number) for number in range(24)]:
            loaded.result()
    # and transformers is as it was
    whole = LlamaForCausalLM.from_pretrained(files.path)
    assert whole.lm_head.weight is whole.model.embed_tokens.weight
    assert whole.lm_head.weight.device.type == "cpu"
