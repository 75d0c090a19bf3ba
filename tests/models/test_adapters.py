"""Blocks with adapters equal PEFT's in one process, through several spans, whoever shares their batches."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES
from in_process import LocalModel, LocalSession, together
from lora_folders import save_adapter, with_adapter
from safetensors.torch import load_file, save_file
from test_families import save_random
from transformers import AutoModelForCausalLM

from lilliput.errors import MissingAdapter, ModelError
from lilliput.models.adapters import CONFIG, WEIGHTS
from lilliput.models.sources import resolve
from lilliput.models.span import Span

SPANS = [(0, 2), (2, 4), (4, 6)]
TOLERANCE = 1e-4
LENGTHS = {"one": 21, "two": 9, "": 14}

#: layers of each family that its two adapters change
TARGETS = {
    "llama": (["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], ["v_proj", "gate_proj"]),
    "gpt2": (["c_attn", "c_proj", "c_fc"], ["c_attn"]),
    "phi3": (["qkv_proj", "gate_up_proj"], ["o_proj", "down_proj"]),
    "bloom": (["query_key_value", "dense", "dense_h_to_4h"], ["dense_4h_to_h"]),
    "falcon, grouped": (["query_key_value", "dense"], ["dense_4h_to_h"]),
    "mixtral": (["q_proj", "o_proj"], ["v_proj"]),
}


@dataclass
class Adapted:
    """:ivar whole: by an adapter's name; the empty one's is the model without"""

    whole: dict[str, Any]
    parts: LocalModel

    def expect(self, outputs: torch.Tensor, ids: torch.Tensor, adapter: str) -> None:
        with torch.no_grad():
            expected = self.whole[adapter](ids).logits
        got = self.parts.head(outputs)
        assert (got - expected).abs().max() < TOLERANCE * expected.abs().max()


@pytest.fixture(scope="module", params=TARGETS)
def adapted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapted]:
    family = next(family for family in FAMILIES if family.name == request.param)
    folder = tmp_path_factory.mktemp("adapted")
    save_random(family, folder / "model")
    first, second = TARGETS[family.name]
    plain = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.3}
    patterns = {"rank_pattern": {second[0]: 3}, "alpha_pattern": {rf"2\..*{second[0]}": 5}}
    adapters = {
        "one": save_adapter(folder / "model", folder / "one", target_modules=first, **plain),
        "two": save_adapter(
            folder / "model", folder / "two", target_modules=second, use_rslora=True, **{**plain, **patterns}
        ),
    }
    options = {"attn_implementation": family.reference}
    whole = {name: with_adapter(folder / "model", saved, **options) for name, saved in adapters.items()}
    whole[""] = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32, **options).eval()
    parts = LocalModel(resolve(str(folder / "model")), SPANS, adapters)
    yield Adapted(whole, parts)
    parts.close()


def random_ids(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 128, (rows, length), generator=torch.Generator().manual_seed(seed))


def test_sessions_with_different_adapters_and_none_share_batches(adapted: Adapted) -> None:
    ids = {name: random_ids(1, length + 3, seed=length) for name, length in LENGTHS.items()}
    hidden = {name: adapted.parts.embed(row) for name, row in ids.items()}
    sessions = {name: LocalSession(adapted.parts.engines, adapter=name) for name in ids}
    outputs = together([(sessions[name], hidden[name][:, :-3]) for name in ids])
    for back in (3, 2, 1):
        last = slice(-back, 1 - back or None)
        step = together([(sessions[name], hidden[name][:, last]) for name in ids])
        outputs = [torch.cat(both, dim=1) for both in zip(outputs, step, strict=True)]
    for name, output in zip(ids, outputs, strict=True):
        adapted.expect(output, ids[name], name)
        sessions[name].close()


@pytest.mark.parametrize("name", LENGTHS)
def test_alone_and_rolled_back(adapted: Adapted, name: str) -> None:
    ids = random_ids(2, 20)
    session = LocalSession(adapted.parts.engines, rows=2, adapter=name)
    hidden = adapted.parts.embed(ids)
    outputs = together([(session, hidden)])
    session.position = 12
    outputs = [outputs[0][:, :12], *together([(session, hidden[:, 12:])])]
    adapted.expect(torch.cat(outputs, dim=1), ids, name)
    session.close()


@pytest.mark.parametrize("name", LENGTHS)
def test_gradients_of_the_inputs(adapted: Adapted, name: str) -> None:
    embed = adapted.whole[""].get_input_embeddings()
    inputs = embed(random_ids(2, 11)).detach()

    def gradient(model: Any) -> torch.Tensor:
        tried = inputs.clone().requires_grad_()
        model(inputs_embeds=tried, use_cache=False).logits.square().sum().backward()
        assert tried.grad is not None
        return tried.grad

    adapted.parts.dense.adapter = name
    try:
        got, expected = gradient(adapted.parts.ends), gradient(adapted.whole[name])
    finally:
        adapted.parts.dense.adapter = ""
    assert (got - expected).abs().max() < TOLERANCE * expected.abs().max()


# ---- files ----


@pytest.fixture(scope="module")
def saved(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "adapter"
    return save_adapter(tiny_llama, folder, r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"])


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


@pytest.fixture(scope="module")
def span(tiny_llama: Path) -> Span:
    return Span.load(resolve(str(tiny_llama)), 2, 4, dtype=torch.float32)


def test_only_the_span_s_own_part_is_kept_and_counted(span: Span, saved: Path) -> None:
    span.add_adapter("mine", saved)
    adapter = span.adapters["mine"]
    assert {index: set(paths) for index, paths in adapter.layers.items()} == {
        index: {"self_attn.q_proj", "mlp.down_proj"} for index in (2, 3)
    }
    assert adapter.nbytes == 2 * 4 * 4 * ((64 + 64) + (128 + 64))
    with pytest.raises(ModelError, match="two adapters"):
        span.add_adapter("mine", saved)
    with pytest.raises(MissingAdapter, match="it has mine"):
        span.check_adapter("another")


REFUSED: dict[str, dict[str, Any]] = {
    "use_dora": {"use_dora": True},
    "bias": {"bias": "all"},
    "lora_bias": {"lora_bias": True},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "layer_replication": {"layer_replication": [[0, 4], [2, 5]]},
    "target_parameters": {"target_parameters": ["experts.w1"]},
    "something_new": {"something_new": {"on": True}},
    "pissa": {"init_lora_weights": "pissa"},
    "LOHA": {"peft_type": "LOHA"},
    "sensible": {"r": 0},
    "rank 4": {"r": 5},
}


@pytest.mark.parametrize("word", REFUSED)
def test_what_would_compute_something_else_is_refused_by_its_name(word: str, span: Span, copy: Path) -> None:
    config = json.loads((copy / CONFIG).read_text())
    (copy / CONFIG).write_text(json.dumps({**config, **REFUSED[word]}))
    with pytest.raises(ModelError, match=word):
        span.add_adapter("refused", copy)
    assert "refused" not in span.adapters


def cut(folder: Path) -> None:
    file = folder / WEIGHTS
    file.write_bytes(file.read_bytes()[:-100])


def rewritten(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS)

    return damage


PREFIX = "base_model.model.model.layers"
DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cut off": (cut, f"{WEIGHTS} is damaged"),
    "no file": (lambda folder: (folder / WEIGHTS).unlink(), f"{WEIGHTS} is not there"),
    "no configuration": (lambda folder: (folder / CONFIG).unlink(), f"no {CONFIG}"),
    "a configuration cut off": (lambda folder: (folder / CONFIG).write_text('{"r": 4'), f"{CONFIG} cannot be read"),
    "half a layer": (
        rewritten(lambda tensors: tensors.pop(f"{PREFIX}.3.self_attn.q_proj.lora_B.weight")),
        r"layers\.3\.self_attn\.q_proj\.lora_A.* without its other half",
    ),
    "a layer missing": (
        rewritten(lambda tensors: [tensors.pop(f"{PREFIX}.3.mlp.down_proj.lora_{half}.weight") for half in "AB"]),
        r"nothing for mlp\.down_proj of block 3",
    ),
    "no numbers": (
        rewritten(lambda tensors: tensors[f"{PREFIX}.2.mlp.down_proj.lora_A.weight"].fill_(torch.nan)),
        r"layers\.2\.mlp\.down_proj.*no finite numbers",
    ),
    "another width": (
        rewritten(lambda tensors: tensors.update({f"{PREFIX}.2.mlp.down_proj.lora_A.weight": torch.zeros(4, 99)})),
        "does not fit",
    ),
    "a deeper model": (
        rewritten(lambda tensors: tensors.update({f"{PREFIX}.6.mlp.down_proj.lora_A.weight": torch.zeros(4, 128)})),
        "for another model",
    ),
    "the head": (
        rewritten(lambda tensors: tensors.update({"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 64)})),
        "lm_head",
    ),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_adapter_is_named_with_what_is_wrong(how: str, span: Span, copy: Path) -> None:
    damage, words = DAMAGE[how]
    damage(copy)
    with pytest.raises(ModelError, match=words):
        span.add_adapter("damaged", copy)


@pytest.mark.parametrize("name", ["", "a:b", "a b", "-a", "x" * 65])
def test_names_that_would_be_mistaken(name: str, span: Span, saved: Path) -> None:
    with pytest.raises(ModelError, match="no name for an adapter"):
        span.add_adapter(name, saved)
