"""What several tests share: the real demo model, and a random tiny one."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from lilliput.cli.nursery import Nursery
from lilliput.models.sources import ModelFiles, resolve
from lilliput.swarm.sockets import remove_stale_sockets

# Who is started in the background of a script inherits that Ctrl-C is ignored, and would hand it on.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def demo_model() -> ModelFiles:
    """SmolLM2-135M-Instruct with its real weights, from the user's cache folder; fetched if it is not there yet."""
    return resolve("smollm2")


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Starts servers fast."""
    with Nursery() as nursery:
        yield nursery
    remove_stale_sockets()


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random Llama of 6 blocks in float32, without a tokenizer. It is shared: write nothing into it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=6,
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        max_position_embeddings=2048,
        # larger than usual, so that the blocks change what passes through them and errors show
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder
