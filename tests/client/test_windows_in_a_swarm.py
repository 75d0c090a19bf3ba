"""Blocks that look at a window only, beside others that look at everything: sessions longer than the servers' caches,
rolled back as far as one likes, found again by their beginning."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig

from lilliput import AutoDistributedModelForCausalLM
from lilliput.cli.local_swarm import LocalSwarm
from lilliput.cli.nursery import Nursery

CACHE, LONGEST = 2048, 2650


def test_a_session_longer_than_the_cache_and_a_rollback_beyond_the_window(tmp_path: Path, nursery: Nursery) -> None:
    config = Gemma3TextConfig(
        num_hidden_layers=4,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
        vocab_size=128,
        sliding_window=24,
        max_position_embeddings=8192,
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    config.initializer_range = 0.2
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Gemma3ForCausalLM(config).save_pretrained(tmp_path / "tiny-gemma3")
    folder = str(tmp_path / "tiny-gemma3")
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    ids = torch.randint(3, 128, (1, 2600), generator=torch.Generator().manual_seed(0))
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "max_new_tokens": 6}
    arguments = ["--dtype", "float32", "--cache-tokens", str(CACHE)]
    # the first server's blocks all have windows, the second's are of both kinds
    with LocalSwarm(folder, [(0, 2), (2, 4)], options=arguments, nursery=nursery) as swarm:
        model = AutoDistributedModelForCausalLM.from_pretrained(
            folder, initial_peers=swarm.initial_peers, dtype="float32"
        )
        remote = model._remote_model
        records = model._shared.run(remote.connection.records(remote.name))
        records = sorted(records, key=lambda record: record.start)
        assert [record.cache_tokens for record in records] == [CACHE, CACHE]
        assert LONGEST < records[1].max_length < records[0].max_length == 8192
        with model.inference_session(max_length=LONGEST) as session:
            for length in (2600, 1000, 50):
                if session.position > length:
                    session.position = length - 5
                expected = whole.generate(ids[:, :length], **options)
                assert model.generate(ids[:, :length], **options).tolist() == expected.tolist()
            recoveries = session.core.recoveries
            assert {(r.peer_id,) for r in recoveries} == {r.new_peer_ids for r in recoveries}  # from each to itself
            assert len({r.peer_id for r in recoveries}) == 2
        model.close()
