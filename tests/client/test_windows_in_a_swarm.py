"""Blocks that all look at a window only: sessions longer than the servers' caches, rolled back as far as one likes."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, MistralConfig, MistralForCausalLM

from lilliput import AutoDistributedModelForCausalLM
from lilliput.cli.local_swarm import LocalSwarm
from lilliput.cli.nursery import Nursery

CACHE = 2048


def test_a_session_longer_than_the_cache_and_a_rollback_beyond_the_window(tmp_path: Path, nursery: Nursery) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = MistralConfig(
        num_hidden_layers=4, vocab_size=128, sliding_window=24, max_position_embeddings=8192, **sizes
    )
    config.initializer_range = 0.2
    with torch.random.fork_rng():
        torch.manual_seed(0)
        MistralForCausalLM(config).save_pretrained(tmp_path / "tiny-mistral")
    folder = str(tmp_path / "tiny-mistral")
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.randint(3, 128, (1, 2600), generator=torch.Generator().manual_seed(0))
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "max_new_tokens": 6}
    arguments = ["--dtype", "float32", "--cache-tokens", str(CACHE)]
    with LocalSwarm(folder, [(0, 2), (2, 4)], options=arguments, nursery=nursery) as swarm:
        model = AutoDistributedModelForCausalLM.from_pretrained(
            folder, initial_peers=swarm.initial_peers, dtype="float32"
        )
        with model.inference_session(max_length=8000) as session:
            for length in (2600, 1000, 50):
                if session.position > length:
                    session.position = length - 5
                expected = whole.generate(ids[:, :length], **options)
                assert model.generate(ids[:, :length], **options).tolist() == expected.tolist()
            recoveries = session.core.recoveries
            assert {(r.peer_id,) for r in recoveries} == {r.new_peer_ids for r in recoveries}  # from each to itself
            assert len({r.peer_id for r in recoveries}) == 2
        model.close()
