"""The real SmolLM2-135M-Instruct, its blocks in three server processes, says what one process says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lilliput import AutoDistributedModelForCausalLM
from lilliput.cli.local_swarm import LocalSwarm
from lilliput.models.sources import ModelFiles

GREEDY: dict[str, Any] = {"do_sample": False}


@pytest.fixture(scope="module")
def local(demo_model: ModelFiles) -> Any:
    return AutoModelForCausalLM.from_pretrained(demo_model.path, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer(demo_model: ModelFiles) -> Any:
    return AutoTokenizer.from_pretrained(demo_model.path, padding_side="left")


@pytest.fixture(scope="module")
def remote() -> Iterator[Any]:
    options = ["--dtype", "float32", "--cache-tokens", "4096"]
    with LocalSwarm("smollm2", [(0, 10), (10, 20), (20, 30)], options=options) as swarm:
        model = AutoDistributedModelForCausalLM.from_pretrained(
            "smollm2", initial_peers=swarm.initial_peers, dtype="float32"
        )
        yield model
        model.close()


def question(tokenizer: Any, text: str) -> torch.Tensor:
    messages = [{"role": "user", "content": text}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    return ids["input_ids"]


def test_it_knows_the_capital_of_france_word_for_word(local: Any, remote: Any, tokenizer: Any) -> None:
    ids = question(tokenizer, "What is the capital of France? Then tell me a long story about it.")
    options = {"max_new_tokens": 64, "output_logits": True, "return_dict_in_generate": True, **GREEDY}
    expected, answer = local.generate(ids, **options), remote.generate(ids, **options)
    assert answer.sequences.tolist() == expected.sequences.tolist()
    assert "Paris" in tokenizer.decode(answer.sequences[0, ids.shape[1] :])
    worst = max(float((a - b).abs().max()) for a, b in zip(answer.logits, expected.logits, strict=True))
    assert worst < 1e-4 * max(float(logits.abs().max()) for logits in expected.logits)


def test_beams(local: Any, remote: Any, tokenizer: Any) -> None:
    ids = question(tokenizer, "Name three colours.")
    options = {"max_new_tokens": 12, "num_beams": 4, **GREEDY}
    assert remote.generate(ids, **options).tolist() == local.generate(ids, **options).tolist()


def test_a_batch_of_unequal_prompts(local: Any, remote: Any, tokenizer: Any) -> None:
    prompts = ["The sky is", "Once upon a time there was a king who", "1, 2, 3, 4,"]
    batch = tokenizer(prompts, return_tensors="pt", padding=True)
    options = {"max_new_tokens": 12, **GREEDY}
    assert remote.generate(**batch, **options).tolist() == local.generate(**batch, **options).tolist()


def test_drafts_by_an_assistant(local: Any, remote: Any, tokenizer: Any) -> None:
    ids = question(tokenizer, "Count from one to ten.")
    options = {"max_new_tokens": 16, **GREEDY}
    expected = local.generate(ids, **options).tolist()
    assert remote.generate(ids, assistant_model=local, **options).tolist() == expected
    assert remote.generate(ids, prompt_lookup_num_tokens=4, **options).tolist() == expected


def test_a_chat_s_next_turn_and_five_tokens_back(local: Any, remote: Any, tokenizer: Any) -> None:
    ids = question(tokenizer, "Who wrote Hamlet?")
    options = {"max_new_tokens": 10, **GREEDY}
    with remote.inference_session(max_length=256) as session:
        answer = remote.generate(ids, **options)
        session.position -= 5
        turn = torch.cat([answer[:, : session.position], question(tokenizer, "Are you sure?")], dim=1)
        before = session.stats[0].computed_tokens
        again = remote.generate(turn, **options)
        assert again.tolist() == local.generate(turn, **options).tolist()
        computed = session.stats[0].computed_tokens - before
        assert computed == turn.shape[1] - (answer.shape[1] - 1 - 5) + 9


@torch.no_grad()
def test_a_sliced_prefix(local: Any, remote: Any, tokenizer: Any) -> None:
    text = "In the beginning the ship lay still in the harbour, and nobody knew its name. " * 40
    ids = tokenizer(text, return_tensors="pt")["input_ids"][:, :600]
    hidden = local.get_input_embeddings()(ids)
    with remote.inference_session(max_length=640) as session:
        cut = torch.cat([session.step(part) for part in hidden.split([37, 1, 550, 12], dim=1)], dim=1)
    logits = remote.lm_head(remote.model.norm(cut[:, -20:]))
    expected = local(ids, logits_to_keep=20).logits
    assert (logits - expected).abs().max() < 1e-4 * expected.abs().max()


def test_the_tokenizer_is_found_where_the_model_says(remote: Any, demo_model: ModelFiles) -> None:
    assert remote.name_or_path == remote.config.name_or_path == str(demo_model.path)
