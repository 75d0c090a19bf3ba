"""What fewer bits cost in quality, and what they bring in speed: without a network, in this process."""

from __future__ import annotations

import contextlib
import functools
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from lilliput.cli.bench.report import Figure
from lilliput.cli.bench.shuffled import shuffled
from lilliput.engine import probe
from lilliput.engine.engine import Engine
from lilliput.engine.scheduler import Budget
from lilliput.engine.session import CacheSession, Step, StepOutput
from lilliput.models import quantization
from lilliput.models.ends import load_ends
from lilliput.models.machine import bytes_a_second
from lilliput.models.plan import block_bytes
from lilliput.models.sources import ModelFiles, resolve
from lilliput.models.span import CPU, Span

#: name, weights, cache
PRECISIONS: tuple[tuple[str, str | None, torch.dtype | None], ...] = (
    ("int8", "int8", None),
    ("int4", "int4", None),
    ("nf4", "nf4", None),
    ("int8 cache", None, torch.int8),
    ("int4, int8 cache", "int4", torch.int8),
)
#: those that are tried with shuffled channels, too, so that groups of numbers are not those that a file had before
_SHUFFLED = (("int8", "int8", None), ("int4", "int4", None), ("nf4", "nf4", None))
_WINDOW = 512
_STREAMS = (1, 4, 8, 16)
_PROMPTS = (128, 512)
#: tokens that each stream has in its cache when its steps are timed
_HISTORY = 32
_PAGE = 32
#: steps of which the fastest counts, in each round
_STEPS = 6


def text() -> str:
    """English prose that every Python has with it: its reference manual, as `help()` shows it."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


def measure(model: str, rounds: int, *, tokens: int = 41 * _WINDOW) -> list[Figure]:
    """Perplexities of the model's precisions beside bfloat16's, and how fast some of its blocks and a large one are."""
    from transformers import AutoTokenizer

    files = resolve(model)
    ids = AutoTokenizer.from_pretrained(files.path)(text(), return_tensors="pt").input_ids[0, :tokens]
    windows = ids[: len(ids) // _WINDOW * _WINDOW].view(-1, _WINDOW)
    note = f"{windows.numel():,} tokens of Python's manual; beside bfloat16"
    figures = _perplexities(files, windows, PRECISIONS, note)
    with shuffled(files) as other:
        if other is not None:
            figures += _perplexities(other, windows, _SHUFFLED, f"channels shuffled; {note}")
    figures += speeds(files, (0, files.blocks // 3), rounds)
    with _large_block() as large:
        figures += speeds(large, (0, 1), rounds)
    return figures


def _perplexities(
    files: ModelFiles,
    windows: torch.Tensor,
    precisions: tuple[tuple[str, str | None, torch.dtype | None], ...],
    note: str,
) -> list[Figure]:
    def measured(quantize: str | None = None, cache: torch.dtype | None = None) -> float:
        span = Span.load(files, 0, files.blocks, dtype=torch.bfloat16, quantize=quantize, cache_dtype=cache)
        return perplexity(files, windows, span)

    base = measured()
    return [
        Figure(f"perplexity, {name}", "", [measured(quantize, cache)], [base], note)
        for name, quantize, cache in precisions
        if quantization.is_here(quantize, CPU)
    ]


def perplexity(files: ModelFiles, windows: torch.Tensor, span: Span) -> float:
    """Of whole windows [windows, tokens] of text, through a span of all blocks and its cache."""
    total = 0.0
    with _Streams(span, windows.shape[1]) as streams, torch.inference_mode():
        ends = load_ends(files, _Through(streams), dtype=torch.bfloat16)
        for window in windows:
            logits = ends(window[None], use_cache=False).logits[0, :-1].float()
            total += nn.functional.cross_entropy(logits, window[1:], reduction="sum").item()
    return float(torch.tensor(total / (windows.numel() - len(windows))).exp())


class _Through(nn.Module):
    """Stands for all blocks of a model's ends."""

    def __init__(self, streams: _Streams) -> None:
        super().__init__()
        self._streams = streams

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._streams.prompt(hidden)


def speeds(files: ModelFiles, blocks: tuple[int, int], rounds: int) -> list[Figure]:
    """Steps of so many streams, and prompts, a second, each precision beside bfloat16 in alternating rounds.

    A figure's note tells what reading the weights once, at the speed of this machine's memory, would allow.
    """
    kinds = [kind for kind in (None, *quantization.KINDS) if quantization.is_here(kind, CPU)]
    memory, facts = bytes_a_second(), files.facts()
    figures = []
    passes: list[tuple[str, Callable[[_Streams], float]]] = [
        *((f"steps of {rows}", functools.partial(_step_seconds, rows=rows)) for rows in _STREAMS),
        *((f"prompts of {tokens}", functools.partial(_prompt_seconds, tokens=tokens)) for tokens in _PROMPTS),
    ]
    with contextlib.ExitStack() as stack:
        streams = {
            kind: stack.enter_context(_Streams(Span.load(files, *blocks, dtype=torch.bfloat16, quantize=kind)))
            for kind in kinds
        }
        for name, seconds in passes:
            took: dict[str | None, list[float]] = {kind: [] for kind in kinds}
            for number in range(rounds + 1):
                for kind in kinds:
                    rate = 1 / seconds(streams[kind])
                    if number:  # the first round warms up
                        took[kind].append(rate)
            for kind in kinds:
                weights = sum(block_bytes(block, "bfloat16", kind) for block in facts.blocks[slice(*blocks)])
                note = (
                    f"{blocks[1] - blocks[0]} blocks of {facts.hidden_size:,}; reading allows {memory / weights:,.0f}"
                )
                beside = took[None] if kind else []
                figures.append(Figure(f"{name}, {kind or 'bfloat16'}", "1/s", took[kind], beside, note))
    return figures


def _step_seconds(streams: _Streams, rows: int) -> float:
    """One token of each of so many streams: the fastest of some steps."""
    took = []
    with streams.session(rows) as session:
        streams.step(session, streams.random(rows, _HISTORY))
        for _ in range(_STEPS):
            hidden = streams.random(rows, 1)
            begun = time.perf_counter()
            streams.step(session, hidden)
            took.append(time.perf_counter() - begun)
    return min(took)


def _prompt_seconds(streams: _Streams, tokens: int) -> float:
    hidden = streams.random(1, tokens)
    begun = time.perf_counter()
    streams.prompt(hidden)
    return time.perf_counter() - begun


class _Streams:
    """A span in an engine.

    :param tokens: the longest prompt
    """

    def __init__(self, span: Span, tokens: int = max(_PROMPTS)) -> None:
        self._span, self._tokens = span, tokens
        pages = max(-(-tokens // _PAGE), max(_STREAMS) * -(-(_HISTORY + _STEPS) // _PAGE))
        self._engine = Engine(span, pages=pages, page_size=_PAGE, budget=Budget(alone=tokens))

    def __enter__(self) -> Self:
        self._engine.start()
        probe.measure(self._engine)  # as a server does: it chooses how many threads a step takes
        return self

    def __exit__(self, *error: object) -> None:
        self._engine.stop()

    def random(self, rows: int, tokens: int) -> torch.Tensor:
        return torch.randn(rows, tokens, self._span.hidden_size).to(self._span.dtype)

    @contextlib.contextmanager
    def session(self, rows: int = 1, length: int = _HISTORY + _STEPS) -> Iterator[CacheSession]:
        span = self._span
        session = self._engine.open(span.start, span.end, rows=rows, max_length=length).result()
        try:
            yield session
        finally:
            self._engine.close(session).result()

    def step(self, session: CacheSession, hidden: torch.Tensor) -> torch.Tensor:
        done: Future[object] = Future()
        self._engine.submit(session, Step(hidden, done=done.set_result))
        output = done.result()
        if isinstance(output, Exception):
            raise output
        assert isinstance(output, StepOutput)
        return output.hidden

    def prompt(self, hidden: torch.Tensor) -> torch.Tensor:
        with self.session(length=hidden.shape[1]) as session:
            return self.step(session, hidden)


@contextlib.contextmanager
def _large_block(hidden: int = 4096) -> Iterator[ModelFiles]:
    """A random block as large as those of an 8-billion model: there the weights count, not the operations between."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        num_hidden_layers=1,
        vocab_size=64,
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large"
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        model = model.to(torch.bfloat16).to_empty(device="cpu")  # type: ignore[arg-type]
        for parameter in model.parameters():
            parameter.data.normal_(std=0.02)
        model.save_pretrained(path)
        del model
        yield resolve(str(path))
