"""The numbers of a plan are those of a loaded span."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from families import FAMILIES, Family
from packaging.version import Version
from test_families import save_random

from lilliput.engine.table import kept_tokens
from lilliput.errors import ModelError, UnsupportedModel
from lilliput.models import quantization
from lilliput.models.experts import QuantizedExperts
from lilliput.models.facts import BlockFacts, ModelFacts, describe
from lilliput.models.paged_cache import Group
from lilliput.models.plan import (
    PRECISIONS,
    Machine,
    block_bytes,
    blocks_that_fit,
    cache_bytes,
    cache_share,
    estimate,
    kept_share,
    working_bytes,
)
from lilliput.models.quantization import QuantizedModule
from lilliput.models.sources import ModelFiles, resolve
from lilliput.models.span import CPU, Span
from lilliput.server.loading import _WINDOWED_STEP


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_cache_and_weights_are_what_a_span_of_this_family_has(family: Family, tmp_path: Path) -> None:
    if Version(transformers.__version__) < Version(family.since):
        pytest.skip(f"works since transformers {family.since}")
    save_random(family, tmp_path / "model")
    files = resolve(str(tmp_path / "model"))
    facts = files.facts()
    span = Span.load(files, 1, 3, dtype=torch.float32, fuse=False)
    assert span.cache_bytes_per_token == sum(cache_bytes(b, "float32") for b in facts.blocks[1:3])
    assert {i: shape.window for i, shape in span.shapes.items()} == {i: facts.blocks[i].window for i in (1, 2)}
    weights = {tensor.data_ptr(): tensor.nbytes for tensor in span._base.state_dict().values()}
    assert sum(weights.values()) == sum(block_bytes(b, "float32") for b in facts.blocks[1:3])
    if family.name == "gpt_oss" and Version(transformers.__version__) < Version("5"):
        with pytest.raises(UnsupportedModel, match=r"GptOssExperts cannot be kept in int8"):
            Span.load(files, 1, 3, dtype=torch.float32, quantize="int8")
        return
    for kind in ("int8", *(["nf4"] if quantization.is_here("nf4", CPU) else [])):
        span = Span.load(files, 1, 3, dtype=torch.float32, quantize=kind, fuse=False)
        weights = {tensor.data_ptr(): tensor.nbytes for tensor in span._base.state_dict().values()}
        codes = [module.layer for module in span._base.modules() if isinstance(module, QuantizedModule)]
        codes += [layer for m in span._base.modules() if isinstance(m, QuantizedExperts) for layer in m.layers]
        total = sum(weights.values()) + sum(layer.nbytes for layer in codes)
        filled = sum(-layer.out_features % 32 * layer.in_features * 9 // 16 for layer in codes if kind == "nf4")
        assert total - filled == sum(block_bytes(b, "float32", kind) for b in facts.blocks[1:3])
        assert kind != "int8" or (sum(layer.nbytes for layer in codes) > 0.5 * total) == (
            family.name not in _TOO_NARROW
        )


#: in its tiny configuration most layers have other widths than kernels take
_TOO_NARROW = {"bloom, 6 heads"}


BLOCK = BlockFacts(matrices=64_000, rows=640, others=100, read=64_000, largest=9_000, cache=128)
MODEL = ModelFacts("made-up", 64, (BLOCK,) * 10, 5_000, 128)


def test_as_many_blocks_fit_as_there_is_room_for() -> None:
    base, each = working_bytes(MODEL, "bfloat16"), 2 * 64_100 + 50 * 2 * 128
    for room, fit in ((-1, 0), (0, 0), (each - 1, 0), (each, 1), (3 * each + 1, 3), (100 * each, 10)):
        assert blocks_that_fit(MODEL, "bfloat16", None, base + room, 50) == fit


def test_the_largest_blocks_must_fit_since_any_may_be_chosen() -> None:
    small = BlockFacts(1_000, 10, 0, 1_000, 1_000, 0)
    mixed = ModelFacts("mixed", 64, (small, BLOCK, small, BLOCK), 0, 128)
    room = working_bytes(mixed, "float32") + block_bytes(BLOCK, "float32") + block_bytes(small, "float32")
    assert blocks_that_fit(mixed, "float32", None, room, 0) == 1


def test_quantized_weights_have_scales() -> None:
    assert block_bytes(BLOCK, "bfloat16", "int8") == 64_000 + 4 * 640 + 200
    assert block_bytes(BLOCK, "bfloat16", "int4") == 32_000 + 4 * 2_000 + 200
    assert block_bytes(BLOCK, "bfloat16", "nf4") == 32_000 + 2 * 2_000 + 200
    with pytest.raises(ModelError, match="unknown quantization"):
        block_bytes(BLOCK, "bfloat16", "int2")


def test_blocks_with_windows_keep_less_of_a_long_conversation() -> None:
    (kept,) = kept_tokens([Group((0,), window=100)], _WINDOWED_STEP)
    assert kept is not None
    narrow = replace(BLOCK, window=100)
    assert [kept_share(narrow, n) for n in (kept // 2, kept, 4 * kept, None)] == [1, 1, 0.25, 1]
    mixed = replace(MODEL, blocks=(narrow, BLOCK, narrow, narrow))
    assert cache_share(mixed, 4 * kept) == (3 * 0.25 + 1) / 4
    one, context = block_bytes(BLOCK, "float32"), 4 * kept
    room = working_bytes(mixed, "float32") + 4 * one + (context + 3 * kept) * 4 * 128
    assert blocks_that_fit(mixed, "float32", None, room, context, context) == 4
    assert blocks_that_fit(mixed, "float32", None, room, context) < 4


@pytest.mark.parametrize(
    ("config", "slides"),
    [
        ({"model_type": "gemma2"}, "+-+-+-"),
        ({"sliding_window_pattern": 3}, "++-++-"),
        ({"layer_types": ["full_attention", "sliding_attention"] * 3, "sliding_window_pattern": 3}, "-+-+-+"),
        ({}, "++++++"),
        ({"use_sliding_window": True, "max_window_layers": 4}, "----++"),
        ({"use_sliding_window": False}, "------"),
        ({"sliding_window": None}, "------"),
    ],
)
def test_which_blocks_have_windows(config: dict[str, object], slides: str) -> None:
    shapes = {f"model.layers.{i}.mlp.up_proj.weight": (16, 8) for i in range(6)}
    config = {"num_hidden_layers": 6, "hidden_size": 8, "sliding_window": 7, **config}
    assert [b.window for b in describe("it", config, shapes).blocks] == [7 if s == "+" else None for s in slides]


def test_of_experts_only_the_chosen_are_read() -> None:
    config = {"num_hidden_layers": 1, "hidden_size": 32, "num_experts": 4, "num_experts_per_tok": 1}
    shapes = {f"model.layers.0.mlp.experts.{i}.up_proj.weight": (16, 32) for i in range(4)}
    shapes["model.layers.0.self_attn.q_proj.weight"] = (32, 32)
    (block,) = describe("experts", config, {**shapes, "model.layers.0.mlp.gate.weight": (4, 32)}).blocks
    assert (block.matrices, block.read, block.others) == (4 * 512 + 1024, 512 + 1024, 4 * 32)
    assert block.largest == 4 * 512


@pytest.mark.parametrize(("into", "out_of"), [((4, 96, 32), (4, 32, 48)), ((4, 32, 96), (4, 48, 32))])
def test_experts_in_one_tensor_are_matrices_too_however_they_lie(
    into: tuple[int, ...], out_of: tuple[int, ...]
) -> None:
    config = {"num_hidden_layers": 1, "hidden_size": 32}
    shapes = {"model.layers.0.mlp.experts.gate_up_proj": into, "model.layers.0.mlp.experts.down_proj": out_of}
    (block,) = describe("experts", config, shapes).blocks
    # 48 inputs are no multiple of 32
    assert (block.matrices, block.rows, block.others) == (4 * 96 * 32, 4 * 96, 4 * 32 * 48)


def test_a_checkpoint_without_a_block_is_named() -> None:
    with pytest.raises(ModelError, match="no tensors of block 1"):
        describe("half", {"num_hidden_layers": 2, "hidden_size": 8}, {"model.layers.0.a.weight": (8, 8)})


def test_the_network_costs_half_a_round_trip_for_each_leg() -> None:
    machine = Machine(working_bytes(MODEL, "float32") + 4 * block_bytes(BLOCK, "float32"), 1e9)
    made = estimate(MODEL, PRECISIONS[0], machine, cache_tokens=0, round_trip_ms=20)
    assert (made.blocks_fit, made.machines, made.network_ms) == (4, 3, 40)
    assert made.compute_ms == pytest.approx(10 * block_bytes(BLOCK, "float32") / 1e6)
    more = estimate(MODEL, PRECISIONS[0], machine, cache_tokens=0, round_trip_ms=20, machines=5)
    assert (more.machines, more.spread, more.network_ms) == (3, 5, 60)
    none = estimate(MODEL, PRECISIONS[0], Machine(1000, 1e9), cache_tokens=0, round_trip_ms=20)
    assert (none.machines, none.network_share) == (None, None)


def test_the_command_reads_no_weights(demo_model: ModelFiles) -> None:
    import subprocess
    import sys

    command = [sys.executable, "-m", "lilliput.cli", "plan", "smollm2", "--memory", "8GB", "--bandwidth", "30"]
    shown = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
    plan = json.loads(shown.stdout)
    by_name = {p["precision"]: p for p in plan["precisions"]}
    assert (plan["blocks"], plan["machine"]["memory_bytes"]) == (30, 8_000_000_000)
    assert by_name["bfloat16"]["block_bytes"] == 2 * by_name["float32"]["block_bytes"] // 4 == 7_080_192
    assert by_name["float32"]["machines"] == 1
    table = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "blocks that fit" in table
    wrong = subprocess.run([*command[:-3], "lots"], capture_output=True, text=True)
    assert wrong.returncode == 2
