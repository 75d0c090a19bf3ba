"""Precision of whole spans: gradients through codes, every dtype, an 8-bit cache in whatever order it is used, and the
memory that loading takes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from lilliput.engine.engine import Engine
from lilliput.engine.scheduler import Budget
from lilliput.engine.session import CacheSession, Step, StepOutput
from lilliput.errors import LilliputError
from lilliput.models.quantization import QuantizedModule
from lilliput.models.sources import ModelFiles, resolve
from lilliput.models.span import Span

BLOCKS = 3
_SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}
_MODELS: dict[str, dict[str, Any]] = {
    "llama": _SIZES,  # fused
    "gpt2": {"vocab_size": 128, "n_embd": 64, "n_layer": BLOCKS, "n_head": 4, "initializer_range": 0.2},
    "qwen2": _SIZES,  # joined projections with biases
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelFiles]:
    made = {}
    for kind, config in _MODELS.items():
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config))
            folder = tmp_path_factory.mktemp("precision") / kind
            model.save_pretrained(folder)
        made[kind] = resolve(str(folder))
    return made


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def distance(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen2"])
def test_spans_compute_as_their_codes_stand_for_forward_and_backward(
    models: dict[str, ModelFiles], kind: str, quantize: str
) -> None:
    """Beside the same span with plain layers of the dequantized weights: outputs, gradients of inputs and prompts."""
    span = Span.load(models[kind], 0, BLOCKS, dtype=torch.float32, quantize=quantize)
    plain = Span.load(models[kind], 0, BLOCKS, dtype=torch.float32, quantize=quantize, fuse=False)
    replaced = 0
    for owner in list(plain._base.modules()):
        for name, child in list(owner.named_children()):
            if isinstance(child, QuantizedModule):
                linear = nn.Linear(child.in_features, child.out_features, bias=child.layer.bias is not None)
                linear.weight.data = child.layer.dequantized()
                if child.layer.bias is not None:
                    linear.bias.data = child.layer.bias
                setattr(owner, name, linear.requires_grad_(False))
                replaced += 1
    assert replaced == BLOCKS * {"llama": 7, "qwen2": 7, "gpt2": 4}[kind]
    results = []
    for one in (span, plain):
        hidden = (random(2, 7, 64)).requires_grad_()
        prompts = (random(BLOCKS, 1, 7, 64, seed=1) * 0.1).requires_grad_()
        out = one.dense(hidden, 0, BLOCKS, prompts=prompts)
        out.backward(random(2, 7, 64, seed=2))
        assert hidden.grad is not None
        assert prompts.grad is not None
        results.append((out.detach(), hidden.grad, prompts.grad))
    for got, expected in zip(*results, strict=True):
        assert distance(got, expected) < 0.03  # few tokens are multiplied in bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_every_dtype_computes(models: dict[str, ModelFiles], dtype: torch.dtype, quantize: str | None) -> None:
    span = Span.load(models["llama"], 0, BLOCKS, dtype=dtype, quantize=quantize)
    exact = Span.load(models["llama"], 0, BLOCKS, dtype=torch.float32)
    hidden = random(1, 5, 64)
    with torch.no_grad():
        got, expected = span.dense(hidden.to(dtype), 0, BLOCKS), exact.dense(hidden, 0, BLOCKS)
    assert got.dtype == dtype
    assert distance(got, expected) < 0.05


@pytest.fixture(scope="module", params=[("llama", True), ("llama", False)], ids=str)
def engines(request: pytest.FixtureRequest, models: dict[str, ModelFiles]) -> Iterator[tuple[Engine, Engine]]:
    """One with a cache of 8 bits, one with a cache in the dtype of the span; pages are small, to cross often."""
    kind, fuse = request.param
    made = []
    for cache in (torch.int8, None):
        span = Span.load(models[kind], 0, BLOCKS, dtype=torch.float32, cache_dtype=cache, fuse=fuse)
        made.append(Engine(span, pages=40, page_size=16, budget=Budget(alone=24, beside_decode=7)))
        made[-1].start()
    yield made[0], made[1]
    for engine in made:
        engine.stop()


def step(engine: Engine, session: CacheSession, hidden: torch.Tensor, **options: Any) -> StepOutput:
    future: Future[StepOutput | LilliputError] = Future()
    engine.submit(session, Step(hidden, done=future.set_result, **options))
    got = future.result(60)
    if isinstance(got, LilliputError):
        raise got
    return got


def test_an_8_bit_cache_is_smaller_and_near_in_steps_rollbacks_and_beams(engines: tuple[Engine, Engine]) -> None:
    small, wide = (engine.span.cache_bytes_per_token for engine in engines)
    assert small == wide * (16 + 4) // (16 * 4)  # 16 numbers and a scale a head, instead of 16 of four bytes
    outputs: list[list[torch.Tensor]] = []
    for engine in engines:
        session = engine.open(0, BLOCKS, rows=3, max_length=64).result(10)
        outputs.append([])
        for hidden, options in (
            (random(1, 37, 64), {}),
            (random(1, 1, 64, seed=1), {}),
            (random(1, 4, 64, seed=2), {"start_position": 30}),  # rolled back
            (random(3, 1, 64, seed=3), {"parents": [0, 0, 0]}),  # three rows share pages, and copy what they write to
            (random(3, 1, 64, seed=4), {"parents": [2, 0, 2]}),
            (random(2, 20, 64, seed=5), {"parents": [1, 2]}),
        ):
            outputs[-1].append(step(engine, session, hidden, **options).hidden)
        engine.close(session).result(10)
        engine.call(engine.pool.check).result(10)
    for got, expected in zip(*outputs, strict=True):
        assert distance(got, expected) < 0.1  # another row, or another place, would be as far as 1


def test_rows_in_an_8_bit_cache_are_as_if_computed_alone(engines: tuple[Engine, Engine]) -> None:
    """Rounding is a token's own: however a prefix was cut or rolled back, the cache holds the same."""
    engine = engines[0]
    prefix, last = random(1, 32, 64, seed=7), random(1, 1, 64, seed=8)

    def answer(*parts: tuple[torch.Tensor, dict[str, Any]]) -> torch.Tensor:
        session = engine.open(0, BLOCKS, rows=1, max_length=64, owner=b"someone").result(10)
        outputs = [step(engine, session, hidden, **options) for hidden, options in parts]
        engine.close(session).result(10)
        return outputs[-1].hidden

    alone = answer((prefix, {}), (last, {}))
    cut = answer((prefix[:, :5], {}), (prefix[:, 5:], {}), (last, {}))
    back = answer((prefix, {}), (random(1, 3, 64, seed=9), {}), (last, {"start_position": 32}))
    for other in (cut, back):
        # a number at the edge between two codes may fall to either side after a different sum
        assert distance(other, alone) < 0.01


_MEASURE = """
import gc, json, sys, threading, torch
from lilliput.models.plan import block_bytes
from lilliput.models.sources import resolve
from lilliput.models import quantization
from lilliput.models.span import CPU, Span

def resident():
    with open("/proc/self/status") as status:
        sizes = dict(line.split(":") for line in status if line.startswith("Rss"))
    own, mapped = (int(sizes[kind].split()[0]) << 10 for kind in ("RssAnon", "RssFile"))
    return own, own + mapped

torch.set_num_threads(1)
files = resolve(sys.argv[1])
facts = files.facts().blocks
kinds = [kind for kind in quantization.KINDS if quantization.is_here(kind, CPU)]
for dtype, quantize in (("bfloat16", None), ("float32", None), *(("bfloat16", kind) for kind in kinds)):
    options = {"dtype": getattr(torch, dtype), "quantize": quantize}
    Span.load(files, 0, 1, **options)  # libraries and their buffers
    gc.collect()
    before, most, done = resident(), (0, 0), threading.Event()

    def watch():
        global most
        while not done.wait(0.0005):
            most = tuple(map(max, most, resident()))

    watcher = threading.Thread(target=watch)
    watcher.start()
    span = Span.load(files, 0, files.blocks, **options)
    done.set()
    watcher.join()
    weights = sum(block_bytes(block, dtype, quantize) for block in facts)
    tensor = max(block.largest for block in facts) * options["dtype"].itemsize
    print(json.dumps([dtype, quantize, weights, tensor, *(m - b for m, b in zip(most, before))]))
    del span
"""
#: Python's own objects, the ends of pages, and what the kernels write a tensor's product to
_BESIDES = 8 << 20


def test_loading_takes_the_spans_weights_and_one_tensor(tmp_path: Path) -> None:
    sizes = {**_SIZES, "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8, "num_hidden_layers": 4}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes))
    model = model.to(torch.bfloat16).to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.uniform_(-0.02, 0.02)
    model.save_pretrained(tmp_path / "large")
    block = sum(parameter.nbytes for parameter in model.model.layers[0].parameters())
    del model
    command = [sys.executable, "-c", _MEASURE, str(tmp_path / "large")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    for dtype, quantize, weights, tensor, own, resident in map(json.loads, run.stdout.splitlines()):
        what = f"{dtype}, {quantize}: {own / weights:.2f} of the weights, {resident / weights:.2f} with mapped files"
        assert 0.9 * weights < own < weights + tensor + _BESIDES, what
        # where weights are written in another dtype than they are kept in, a block of the file stays mapped meanwhile
        assert resident < weights + tensor + _BESIDES + (block if dtype == "float32" else 0), what
