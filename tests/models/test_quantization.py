"""Weights of 8 and 4 bits, and caches of 8: against what they stand for, and against 16 and 32 bits."""

from __future__ import annotations

import sys
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
import transformers
from families import FAMILIES
from in_process import DEVICE
from packaging.version import Version
from test_families import save_random
from torch import nn
from transformers import AutoModel

from lilliput.engine.engine import Engine
from lilliput.engine.session import CacheSession, Step, StepOutput
from lilliput.errors import ModelError, UnsupportedModel
from lilliput.models import nf4_linear, quantization
from lilliput.models.call import ATTENTION
from lilliput.models.experts import QuantizedExperts
from lilliput.models.fused import LooseLinear
from lilliput.models.holes import blocks_of, keep_span, load_with_holes
from lilliput.models.int4_linear import Int4Linear
from lilliput.models.int8_linear import Int8Linear
from lilliput.models.nf4_linear import Nf4Linear
from lilliput.models.quantization import KINDS, QuantizedModule
from lilliput.models.quantized_linear import QuantizedLinear
from lilliput.models.sources import ModelFiles, resolve
from lilliput.models.span import Span

CLASSES = {"int8": Int8Linear, "int4": Int4Linear, "nf4": Nf4Linear}
#: relative to what the exact weights give: random ones are the hardest there are
ERROR = {"int8": 0.015, "int4": 0.12, "nf4": 0.12}


def difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.float() - expected.float()).norm() / expected.float().norm())


def typical_difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Of a token: some may go to other experts, where two were nearly equal before the kernels' rounding."""
    return float(((got - expected).norm(dim=-1) / expected.norm(dim=-1)).median())


@pytest.fixture(params=["small", "large"], autouse=True)
def size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large layers of 8 bits are multiplied in another way."""
    if request.param == "large":
        if "int8" not in request.node.name:
            pytest.skip("the same")
        monkeypatch.setattr("lilliput.models.int8_linear._LARGE", 1)


@pytest.fixture(params=[*KINDS, "nf4 as other devices have it"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "int4" and DEVICE.type != "cpu":
        pytest.skip("int4 is the processor's")
    if request.param.startswith("nf4") and not (request.param == "nf4" and nf4_linear.has_kernel()):
        # bitsandbytes' own layout and functions: the way of CUDA, and of no fast kernel
        monkeypatch.setattr(nf4_linear, "has_kernel", lambda: False)
        monkeypatch.setattr(Nf4Linear, "check", lambda device: None)
    return request.param.split()[0]


def make(kind: str, rows: int = 192, columns: int = 96, *, bias: bool = True) -> tuple[QuantizedLinear, torch.Tensor]:
    torch.manual_seed(rows + columns)
    weight = torch.randn(rows, columns).to(DEVICE)
    return CLASSES[kind].of(weight, torch.randn(rows).to(DEVICE) if bias else None), weight


def test_the_codes_stand_for_nearly_the_weights(kind: str) -> None:
    layer, weight = make(kind)
    assert difference(layer.dequantized(), weight) < ERROR[kind]


@pytest.mark.parametrize("rows", [192, 80])  # 80: the 4-bit kernel's packing cannot be read back
@pytest.mark.parametrize("tokens", [1, 3, 12, 200])
def test_few_tokens_and_many_are_multiplied_with_the_same_weights(kind: str, rows: int, tokens: int) -> None:
    layer, _ = make(kind, rows)
    x = torch.randn(2, tokens, 96).to(DEVICE)
    assert difference(layer(x), x @ layer.dequantized().t() + layer.bias) < 0.01  # type: ignore[operator]
    assert layer(x).dtype == torch.float32


def test_layers_side_by_side_are_one_layer(kind: str) -> None:
    parts = [make(kind, 64)[0], make(kind, 80, bias=False)[0], make(kind, 192)[0]]
    x = torch.randn(5, 96).to(DEVICE)
    joined = quantization.joined([QuantizedModule(part) for part in parts])
    assert difference(joined(x), torch.cat([part(x) for part in parts], dim=-1)) < 1e-6
    assert difference(joined.dequantized(), torch.cat([part.dequantized() for part in parts])) == 0


def test_gradients_are_those_of_the_weights_that_the_codes_stand_for(kind: str) -> None:
    layer, _ = make(kind)
    x, grad = torch.randn(2, 7, 96).to(DEVICE).requires_grad_(), torch.randn(2, 7, 192).to(DEVICE)
    layer(x).backward(grad)
    assert x.grad is not None
    assert difference(x.grad, grad @ layer.dequantized()) < 1e-5


def test_a_group_of_equal_numbers_keeps_them(kind: str) -> None:
    weight = torch.full((64, 64), 0.37).to(DEVICE)
    weight[0] = 0.0
    assert difference(CLASSES[kind].of(weight, None).dequantized(), weight) < 0.005


@pytest.mark.parametrize("group", [32, 64, 128])
def test_weights_of_4_bits_in_larger_groups_are_kept_as_they_are(group: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 256)
    groups = weight.view(64, -1, group)
    low, high = groups.amin(dim=-1, keepdim=True), groups.amax(dim=-1, keepdim=True)
    old = (((groups - low) / (high - low) * 15).round() / 15 * (high - low) + low).view(64, 256).bfloat16()
    assert difference(Int4Linear.of(old, None).dequantized(), old) < 0.011
    assert difference(Int4Linear.of(weight, None).dequantized(), weight) > 0.05


def test_layers_that_no_kernel_takes_stay_as_they_are(kind: str) -> None:
    block = nn.ModuleDict({"odd": nn.Linear(100, 64), "narrow": nn.Linear(64, 5), "good": nn.Linear(64, 32)})
    quantization.quantize(block, kind)
    assert [type(child) for child in block.children()] == [nn.Linear, nn.Linear, QuantizedModule]


def test_experts_that_are_laid_out_in_some_other_way_are_refused(kind: str) -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.Parameter(torch.zeros(4, 64, 64))

    with pytest.raises(UnsupportedModel, match=f"Experts cannot be kept in {kind} .*weights.*without --quantize"):
        quantization.quantize(nn.ModuleDict({"experts": Experts()}), kind)


def test_what_there_is_not_is_refused(tiny_llama: Path) -> None:
    files = resolve(str(tiny_llama))
    with pytest.raises(ModelError, match=r"int3.*int8, int4"):
        Span.load(files, 0, 1, dtype=torch.float32, quantize="int3")


def test_4_bits_say_what_they_need(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = resolve(str(tiny_llama))
    with pytest.raises(ModelError, match=r"int4 is for the processor.*nf4"):
        Span.load(files, 0, 1, dtype=torch.float32, quantize="int4", device=torch.device("cuda"))
    with monkeypatch.context() as patch:
        patch.setattr(nf4_linear._functions(), "has_avx512bf16", lambda: False)
        nf4_linear.has_kernel.cache_clear()
        with pytest.raises(ModelError, match=r"nf4 needs CUDA.*AVX512-BF16.*take int4"):
            Span.load(files, 0, 1, dtype=torch.float32, quantize="nf4")
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    nf4_linear._bitsandbytes.cache_clear()
    with pytest.raises(ModelError, match="pip install bitsandbytes"):
        Span.load(files, 0, 1, dtype=torch.float32, quantize="nf4")
    nf4_linear.has_kernel.cache_clear()


def test_8_bits_without_a_kernel_are_multiplied_as_wide_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lilliput.models.int8_linear._takes_codes", lambda device: False)
    monkeypatch.setattr("lilliput.models.int8_linear._has_products", lambda: False)
    layer, _ = make("int8", bias=False)
    x = torch.randn(3, 96).to(DEVICE)
    assert difference(layer(x), x @ layer.dequantized().t()) < 1e-6


# ---- spans ----

EXPERTS = ["qwen3_moe", "deepseek_v3", "gpt_oss"]


@pytest.fixture(scope="module", params=["llama", "qwen3", "gpt2", "phi3", "mixtral", *EXPERTS])
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    if request.param == "gpt_oss" and Version(transformers.__version__) < Version("5"):
        pytest.skip("refused, see test_plan.py")
    folder = tmp_path_factory.mktemp("quantized")
    save_random(next(family for family in FAMILIES if family.name == request.param), folder)
    return resolve(str(folder))


def run(engine: Engine, session: CacheSession, hidden: torch.Tensor) -> torch.Tensor:
    done: Future[object] = Future()
    engine.submit(session, Step(hidden, done=done.set_result))
    output = done.result(60)
    assert isinstance(output, StepOutput), output
    return output.hidden


def generated(span: Span, hidden: torch.Tensor) -> torch.Tensor:
    """A prefix and single tokens through an engine."""
    engine = Engine(span, pages=8, page_size=16)
    engine.start()
    try:
        session = engine.open(span.start, span.end, rows=1, max_length=hidden.shape[1]).result()
        parts = [
            run(engine, session, hidden[:, :20]),
            *(run(engine, session, hidden[:, i : i + 1]) for i in range(20, 24)),
        ]
        engine.close(session).result()
        assert engine.pool.used == 0
    finally:
        engine.stop()
    return torch.cat(parts, dim=1)


def test_a_quantized_span_computes_with_the_weights_its_codes_stand_for(
    files: ModelFiles, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    span = Span.load(files, 1, 4, dtype=torch.float32, quantize=kind, device=DEVICE)
    # the same model with the rounded weights, in float32
    model = load_with_holes(files, AutoModel, keep_span(1, 4), (1, 4), dtype=torch.float32, attention=ATTENTION)
    model.to(DEVICE)  # type: ignore[arg-type]
    count = 0
    for block in list(blocks_of(model))[1:4]:
        quantization.quantize(block, kind)
        count += make_plain(block)
    assert count >= 3 * 4
    rounded = Span(model, 1, 4, device=DEVICE)
    assert rounded.fused == span.fused
    torch.manual_seed(1)
    hidden = torch.randn(1, 24, span.hidden_size)
    assert typical_difference(generated(span, hidden) - hidden, generated(rounded, hidden) - hidden) < 0.02
    exact = Span.load(files, 1, 4, dtype=torch.float32, device=DEVICE)
    assert difference(generated(exact, hidden) - hidden, generated(rounded, hidden) - hidden) > 0.005
    results = []
    for layer in ("int4", "int8"):  # wide weights are exact, and so are gradients then
        monkeypatch.setattr(f"lilliput.models.{layer}_linear._MANY", 1)
    monkeypatch.setattr(Nf4Linear, "_product", lambda self, x: x @ self.dequantized().t())
    for one in (span, rounded):
        given = hidden.to(DEVICE, copy=True).requires_grad_()
        with one.on_device():
            out = one.dense(given, 1, 4)
        out.square().sum().backward()
        assert given.grad is not None
        results.append((out.detach(), given.grad))
    for got, expected in zip(*results, strict=True):
        assert typical_difference(got, expected) < 0.01


def make_plain(block: nn.Module) -> int:
    """Give layers and experts back to the family, with the weights that their codes stand for; how many there were."""
    count = 0
    for owner in list(block.modules()):
        for name, child in list(owner.named_children()):
            if isinstance(child, QuantizedModule):
                setattr(owner, name, as_linear(child.layer))
                count += 1
            elif isinstance(child, QuantizedExperts):
                setattr(owner, name, as_experts(child))
                count += len(child.layers)
    return count


def as_experts(experts: QuantizedExperts) -> nn.Module:
    """The family's own experts."""
    family = experts.family
    half = len(experts.layers) // 2
    for name, layers in (("gate_up_proj", experts.layers[:half]), ("down_proj", experts.layers[half:])):
        weight = torch.stack([layer.dequantized() for layer in layers])
        weight = weight.transpose(1, 2).contiguous() if family.is_transposed else weight
        setattr(family, name, nn.Parameter(weight, requires_grad=False))
        if family.has_bias:
            bias = torch.stack([layer.bias for layer in layers])  # type: ignore[misc]
            setattr(family, f"{name}_bias", nn.Parameter(bias, requires_grad=False))
    return family


def as_linear(layer: QuantizedLinear) -> nn.Linear:
    linear = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
    linear.weight.data = layer.dequantized()
    if layer.bias is not None:
        linear.bias.data = layer.bias
    return linear.requires_grad_(False)


def test_a_cache_of_8_bits_is_nearly_the_cache(files: ModelFiles) -> None:
    exact = Span.load(files, 1, 4, dtype=torch.float32, device=DEVICE)
    span = Span.load(files, 1, 4, dtype=torch.float32, cache_dtype=torch.int8, device=DEVICE)
    assert span.cache_bytes_per_token < 0.4 * exact.cache_bytes_per_token
    torch.manual_seed(1)
    hidden = torch.randn(1, 24, span.hidden_size)
    error = difference(generated(span, hidden) - hidden, generated(exact, hidden) - hidden)
    assert 0 < error < 0.03


def test_only_a_part_of_a_span_is_ever_there_in_full(
    files: ModelFiles, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []

    def punch(start: int, end: int):  # type: ignore[no-untyped-def]
        read.append(end - start)
        return keep_span(start, end)

    with monkeypatch.context() as patch:
        patch.setattr("lilliput.models.span.keep_span", punch)
        patch.setattr("lilliput.models.span._PART_BYTES", 1)
        in_parts = Span.load(files, 0, 4, dtype=torch.float32, quantize=kind)
    assert read == [1, 1, 1, 1]
    hidden = torch.randn(1, 24, in_parts.hidden_size)
    at_once = Span.load(files, 0, 4, dtype=torch.float32, quantize=kind)
    assert difference(in_parts.dense(hidden, 0, 4), at_once.dense(hidden, 0, 4)) < 1e-5


def test_layers_of_a_family_side_by_side_are_differentiable() -> None:
    layers = [torch.nn.Linear(32, outputs, bias=False).requires_grad_(False) for outputs in (8, 24)]
    grad, weight = torch.randn(5, 32), torch.cat([layer.weight for layer in layers])
    assert torch.allclose(LooseLinear(layers).backward(grad), grad @ weight, atol=1e-5)
    quantized = [QuantizedModule(Int8Linear.of(layer.weight, None)) for layer in layers]
    weight = torch.cat([module.layer.dequantized() for module in quantized])
    assert torch.allclose(LooseLinear(quantized).backward(grad), grad @ weight, atol=1e-4)
