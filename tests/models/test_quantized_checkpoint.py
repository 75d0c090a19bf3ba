"""Checkpoints in fewer bits: served as the same model whose weights are the numbers that the codes stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, GptOssConfig, LlamaConfig

from lilliput.errors import ModelError, UnsupportedModel
from lilliput.models.checkpoint import SINGLE
from lilliput.models.ends import load_ends
from lilliput.models.quantized_checkpoint import METHODS
from lilliput.models.sources import check_config, resolve
from lilliput.models.span import Span

GROUP = 32
LLAMA: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}
Tensors = dict[str, torch.Tensor]


def words(codes: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """[rows, columns] -> int32: neighbours in a row share a word, the first in its lowest bits."""
    each = 32 // bits
    values = codes.long().view(len(codes), -1, each)
    if order is not None:
        values = values[..., order]
    packed = sum(values[..., i] << (bits * i) for i in range(each))
    assert isinstance(packed, torch.Tensor)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)


def grouped(weight: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [out, in], scales [out, groups], zeros [out, groups] of a weight."""
    groups = weight.view(len(weight), -1, GROUP)
    low, high = groups.amin(-1), groups.amax(-1)
    scales = ((high - low) / (2**bits - 1)).half().float()
    zeros = (-low / scales).round().clamp(0, 2**bits - 1)
    codes = (groups / scales[..., None] + zeros[..., None]).round().clamp(0, 2**bits - 1)
    return codes.flatten(1), scales, zeros


def wide(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    return ((codes.view(*scales.shape, GROUP) - zeros[..., None]) * scales[..., None]).flatten(1)


def gptq(weight: torch.Tensor, bits: int, *, v2: bool = False, shuffled: bool = False) -> tuple[Tensors, torch.Tensor]:
    order = torch.randperm(weight.shape[1]) if shuffled else torch.arange(weight.shape[1])
    codes, scales, zeros = grouped(weight[:, order], bits)
    plain = torch.empty_like(weight)
    plain[:, order] = wide(codes, scales, zeros)
    places, group = torch.empty_like(codes), torch.empty(len(order), dtype=torch.int32)
    places[:, order] = codes
    group[order] = torch.arange(len(order), dtype=torch.int32) // GROUP
    stored = zeros if v2 else (zeros - 1) % 2**bits
    tensors = {
        ".qweight": words(places, bits).t().contiguous(),
        ".qzeros": words(stored.t(), bits),
        ".scales": scales.t().half().contiguous(),
    }
    return tensors | ({".g_idx": group} if shuffled else {}), plain


def awq(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    codes, scales, zeros = grouped(weight, 4)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        ".qweight": words(codes.t(), 4, order),
        ".qzeros": words(zeros.t(), 4, order),
        ".scales": scales.t().half().contiguous(),
    }
    return tensors, wide(codes, scales, zeros)


def fp8(weight: torch.Tensor, block: int = 80) -> tuple[Tensors, torch.Tensor]:
    scales = torch.rand(-(-weight.shape[0] // block), -(-weight.shape[1] // block)) + 0.5
    row, column = (torch.arange(n) // block for n in weight.shape)
    each = scales[row][:, column]
    codes = (weight / each).to(torch.float8_e4m3fn)
    return {".weight": codes, ".weight_scale_inv": scales}, codes.float() * each


KINDS: dict[str, tuple[dict[str, Any], Any]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP}, lambda w: gptq(w, 4)),
    "gptq in 8 bits, reordered": (
        {"quant_method": "gptq", "bits": 8, "group_size": GROUP, "desc_act": True},
        lambda w: gptq(w, 8, shuffled=True),
    ),
    "gptq_v2": (
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "checkpoint_format": "gptq_v2"},
        lambda w: gptq(w, 4, v2=True),
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, awq),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [80, 80]}, fp8),
}


@pytest.fixture(params=KINDS)
def folders(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    """A Llama whose blocks are quantized, and the same one in full."""
    how, pack = KINDS[request.param]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**LLAMA))
    kept, full = tmp_path / "kept", tmp_path / "full"
    packed: Tensors = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and ".layers." in name:
            tensors, module.weight.data = pack(module.weight.data)
            packed |= {f"{name}{ending}": tensor for ending, tensor in tensors.items()}
    model.save_pretrained(full)
    model.save_pretrained(kept)
    tensors = load_file(full / SINGLE)
    others = {name: t for name, t in tensors.items() if not (".layers." in name and name.endswith("_proj.weight"))}
    packed = {name: tensor.contiguous() for name, tensor in packed.items()}
    save_file(others | packed, kept / SINGLE, metadata={"format": "pt"})
    config = json.loads((kept / "config.json").read_text())
    (kept / "config.json").write_text(json.dumps(config | {"quantization_config": how}))
    return kept, full


def test_a_checkpoint_in_fewer_bits_is_the_model_that_its_codes_stand_for(folders: tuple[Path, Path]) -> None:
    kept, full = (resolve(str(folder)) for folder in folders)
    assert kept.facts().blocks == full.facts().blocks
    assert kept.fingerprint == full.fingerprint
    hidden = torch.randn(2, 5, LLAMA["hidden_size"], generator=torch.Generator().manual_seed(1))
    outputs = [Span.load(files, 1, 3, dtype=torch.float32).dense(hidden, 1, 3) for files in (kept, full)]
    assert torch.allclose(*outputs, rtol=1e-5, atol=1e-5)
    ends = [load_ends(files, nn.Identity(), dtype=torch.float32) for files in (kept, full)]
    for one, other in zip(*(end.state_dict().values() for end in ends), strict=True):
        assert torch.equal(one, other)


def test_it_can_be_kept_in_few_bits_again(folders: tuple[Path, Path]) -> None:
    hidden = torch.randn(2, 5, LLAMA["hidden_size"], generator=torch.Generator().manual_seed(1))
    kept, full = (
        Span.load(resolve(str(folder)), 0, 3, dtype=torch.bfloat16, quantize="int8").dense(hidden.bfloat16(), 0, 3)
        for folder in folders
    )
    assert torch.equal(kept, full)


def test_codes_without_the_scales_that_are_known_are_no_weights(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(LlamaConfig(**LLAMA)).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / SINGLE)
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    tensors[f"{name}_scale"] = torch.ones(1)  # another program's way to name it
    save_file(tensors, tmp_path / SINGLE, metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ModelError, match=r"up_proj.weight as torch.float8_e4m3fn and none of what fp8"):
        Span.load(resolve(str(tmp_path)), 0, 3, dtype=torch.float32)


def test_experts_in_mxfp4_are_those_that_transformers_reads(tmp_path: Path) -> None:
    config = GptOssConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=8,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / SINGLE)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(118, 124, (experts, outputs, inputs // 32), dtype=torch.uint8)
    save_file(tensors, tmp_path / SINGLE, metadata={"format": "pt"})
    made = json.loads((tmp_path / "config.json").read_text())
    made["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (tmp_path / "config.json").write_text(json.dumps(made))
    files = resolve(str(tmp_path))
    assert files.facts().blocks[0].matrices > 4 * 64 * 96 * 3  # the experts are counted as what they stand for
    span = Span.load(files, 0, 2, dtype=torch.bfloat16, fuse=False)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).model.layers
    for index in range(2):
        for name in ("gate_up_proj", "down_proj"):
            ours = getattr(span._base.layers[index].block.mlp.experts, name)
            assert torch.equal(ours, getattr(theirs[index].mlp.experts, name))
    if Version(transformers.__version__) >= Version("5"):
        small = Span.load(files, 0, 2, dtype=torch.bfloat16, quantize="int4", fuse=False)
        hidden = torch.randn(1, 6, 64).bfloat16()
        got, exact = small.dense(hidden, 0, 2), span.dense(hidden, 0, 2)
        assert (got - exact).norm() < 0.3 * (exact - hidden).norm()


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            r"quantized with bitsandbytes, which is not read.*GGUF",
        ),
        ({"quant_method": "compressed-tensors"}, r"quantized with compressed-tensors, which is not read"),
        ({"bits": 4}, r"a method that it does not name"),
        ({"quant_method": "gptq", "bits": 3}, r"gptq, in 3 bits, where 2, 4, 8 are read"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, r"awq, in its version gemv"),
    ],
)
def test_other_ways_are_refused_from_the_configuration_alone(how: dict[str, Any], reason: str, tmp_path: Path) -> None:
    config = {**LlamaConfig(**LLAMA).to_dict(), "quantization_config": how}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=reason):
        check_config(tmp_path)


def test_every_way_is_tried_here() -> None:
    assert {how["quant_method"] for how, _ in KINDS.values()} | {"mxfp4"} == set(METHODS)
