"""What fewer bits cost in quality, and what they bring in speed: without a network, in this process."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lilliput.cli.bench.report import Figure
from lilliput.models.batch import Chunk, DecodeGroup, PackedBatch, Places
from lilliput.models.ends import load_ends
from lilliput.models.sources import ModelFiles, resolve
from lilliput.models.span import Span

#: name, weights, cache
PRECISIONS: tuple[tuple[str, str | None, torch.dtype | None], ...] = (
    ("int8", "int8", None),
    ("int4", "int4", None),
    ("int8 cache", None, torch.int8),
    ("int4, int8 cache", "int4", torch.int8),
)
_WINDOW = 512
#: one stream's steps that are timed, after a prefix of `_WINDOW` tokens
_STEPS = 30


def text() -> str:
    """English prose that every Python has with it: its reference manual, as `help()` shows it."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


def measure(model: str, rounds: int, *, tokens: int = 41 * _WINDOW) -> list[Figure]:
    """Perplexities of the model's precisions beside bfloat16's, and how fast one stream's steps are."""
    from transformers import AutoTokenizer

    files = resolve(model)
    ids = AutoTokenizer.from_pretrained(files.path)(text(), return_tensors="pt").input_ids[0, :tokens]
    windows = ids[: len(ids) // _WINDOW * _WINDOW].view(-1, _WINDOW)
    figures = []
    base = perplexity(files, windows, Span.load(files, 0, files.blocks, dtype=torch.bfloat16))
    for name, quantize, cache in PRECISIONS:
        span = Span.load(files, 0, files.blocks, dtype=torch.bfloat16, quantize=quantize, cache_dtype=cache)
        note = f"{windows.numel():,} tokens of Python's manual; beside bfloat16"
        figures.append(Figure(f"perplexity in {name}", "", [perplexity(files, windows, span)], [base], note))
    figures += speeds(files, (0, files.blocks), rounds, "one stream, blocks only")
    with _large_model() as large:
        figures += speeds(large, (0, large.blocks), rounds, f"{large.blocks} blocks of 4,096 hidden")
    return figures


def perplexity(files: ModelFiles, windows: torch.Tensor, span: Span) -> float:
    """Of whole windows [windows, tokens] of text, through a span of all blocks and its cache."""
    through = _Through(span, windows.shape[1])
    ends = load_ends(files, through, dtype=torch.bfloat16)
    total = 0.0
    with torch.inference_mode():
        for window in windows:
            logits = ends(window[None], use_cache=False).logits[0, :-1].float()
            total += nn.functional.cross_entropy(logits, window[1:], reduction="sum").item()
    return float(torch.tensor(total / (windows.numel() - len(windows))).exp())


class _Through(nn.Module):
    """Stands for all blocks of a model's ends: a window at a time through a span and its cache."""

    def __init__(self, span: Span, tokens: int) -> None:
        super().__init__()
        self._span, self._tokens = span, tokens
        self._pools = span.new_cache(1, tokens, divided=False).blocks

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        at = torch.arange(self._tokens)
        chunk = Chunk(1, self._tokens, 0, torch.zeros(1, 1, 1, dtype=torch.int64))
        places = Places(self._tokens, at[None], chunks=[chunk])
        batch = PackedBatch(at, dict.fromkeys(self._span.shapes, places))
        return self._span.paged(hidden[0], batch, self._pools, self._span.start, self._span.end)[None]


def speeds(files: ModelFiles, blocks: tuple[int, int], rounds: int, note: str) -> list[Figure]:
    """Steps of one token a second, each precision beside bfloat16 in alternating rounds."""
    base = _Stream(Span.load(files, *blocks, dtype=torch.bfloat16))
    figures = []
    for name, quantize, cache in PRECISIONS:
        stream = _Stream(Span.load(files, *blocks, dtype=torch.bfloat16, quantize=quantize, cache_dtype=cache))
        figure = Figure(f"steps in {name}", "1/s", note=f"{note}; beside bfloat16")
        for number, (ours, theirs) in enumerate(itertools.repeat((stream, base), rounds + 1)):
            took, base_took = ours.seconds(), theirs.seconds()
            if number:
                figure.values.append(1 / took)
                figure.reference.append(1 / base_took)
        figures.append(figure)
    return figures


class _Stream:
    """One stream in the middle of its text."""

    def __init__(self, span: Span) -> None:
        self._span = span
        self._pools = span.new_cache(1, 2 * _WINDOW, divided=False).blocks
        for pool in self._pools.values():
            pool.zero_()

    def seconds(self) -> float:
        """The fastest of some steps."""
        hidden = torch.randn(1, self._span.hidden_size).to(self._span.dtype)
        page = torch.zeros(1, 1, 1, dtype=torch.int64)
        took = []
        for place in range(_WINDOW, _WINDOW + _STEPS):
            at = torch.tensor([place])
            places = Places(2 * _WINDOW, at[None], decode=[DecodeGroup(page, at + 1)])
            batch = PackedBatch(at, dict.fromkeys(self._span.shapes, places))
            begun = time.perf_counter()
            self._span.paged(hidden, batch, self._pools, self._span.start, self._span.end)
            took.append(time.perf_counter() - begun)
        return min(took)


@contextlib.contextmanager
def _large_model(hidden: int = 4096, blocks: int = 3) -> Iterator[ModelFiles]:
    """Random blocks as large as those of an 8-billion model: there the weights count, not the operations between."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        num_hidden_layers=blocks,
        vocab_size=64,
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large"
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        model = model.to(torch.bfloat16).to_empty(device="cpu")  # type: ignore[arg-type]
        for parameter in model.parameters():
            parameter.data.uniform_(-0.02, 0.02)
        model.save_pretrained(path)
        del model
        yield resolve(str(path))
