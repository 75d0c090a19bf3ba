"""A model whose blocks are computed by engines of this process.

The ends, the gate, the cache, the engines and the spans are the real ones; only the network between them is left out.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lilliput.client.cache import SwarmCache
from lilliput.client.gate import CACHE_NAMES, Gate
from lilliput.engine.engine import Engine
from lilliput.engine.scheduler import Budget
from lilliput.engine.session import Step, StepOutput
from lilliput.errors import LilliputError
from lilliput.models.ends import load_ends
from lilliput.models.sources import ModelFiles
from lilliput.models.span import Span

_SECONDS = 30
#: `LILLIPUT_TEST_DEVICE=cuda make models` proves the families on a GPU
DEVICE = torch.device(os.environ.get("LILLIPUT_TEST_DEVICE", "cpu"))


class LocalModel:
    """A causal language model, and engines that each hold a span of its blocks.

    :ivar ends: the model as a client has it: Hugging Face's class with all blocks punched out but the gate
    """

    def __init__(
        self, files: ModelFiles, spans: Sequence[tuple[int, int]], adapters: Mapping[str, Path] | None = None
    ) -> None:
        self.engines = [
            Engine(
                Span.load(files, start, end, dtype=torch.float32, device=DEVICE),
                pages=64,
                page_size=16,
                budget=Budget(alone=24, beside_decode=7),  # small, so that prefixes are computed in slices
            )
            for start, end in spans
        ]
        for engine in self.engines:
            for name, folder in (adapters or {}).items():
                engine.span.add_adapter(name, folder)
            engine.start()
        self.blocks = spans[-1][1]
        self.dense = _Dense(self.engines)
        self.gate = Gate(self.dense)  # type: ignore[arg-type]
        self.ends: Any = load_ends(files, self.gate, dtype=torch.float32)
        self.gate.watch(self.ends)

    @torch.no_grad()
    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """What enters the first block for `ids` [rows, tokens]: [rows, tokens, hidden]."""
        seen: list[torch.Tensor] = []

        def answer(hidden: torch.Tensor) -> torch.Tensor:
            seen.append(hidden)
            return hidden

        with self.gate.answering(answer):
            self.ends(ids, use_cache=False)
        return seen[0]

    @torch.no_grad()
    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of what leaves the last block."""
        with self.gate.answering(lambda _: hidden):
            return self.ends(torch.zeros(hidden.shape[:2], dtype=torch.int64), use_cache=False).logits

    def generate(self, ids: torch.Tensor, rows: int, **options: Any) -> torch.Tensor:
        """Hugging Face's generate(), its cache in the engines."""
        session = LocalSession(self.engines, rows)
        parameters = inspect.signature(self.ends.prepare_inputs_for_generation).parameters
        name = next(name for name in CACHE_NAMES if name in parameters)
        try:
            return self.ends.generate(ids, **{name: SwarmCache(session, self.blocks)}, **options)  # type: ignore[arg-type]
        finally:
            session.close()

    def close(self) -> None:
        for engine in self.engines:
            engine.stop()


class LocalSession:
    """Caches in every engine. Stands for `InferenceSession`."""

    def __init__(self, engines: Sequence[Engine], rows: int = 1, max_length: int = 128, adapter: str = "") -> None:
        self.position = self.rows = 0
        self.max_rows = rows
        self.tokens: torch.Tensor | None = None
        self._parents: list[int] | None = None
        self.hops = [
            (
                engine,
                engine.open(span.start, span.end, rows=rows, max_length=max_length, adapter=adapter).result(_SECONDS),
            )
            for engine in engines
            for span in [engine.span]
        ]

    def reorder(self, parents: Sequence[int]) -> None:
        before = self._parents or list(range(self.rows))
        self._parents = [before[parent] for parent in parents]
        self.rows = len(parents)

    def step(self, hidden: torch.Tensor, **options: Any) -> torch.Tensor:
        return together([(self, hidden)], mask=options["mask"], position_ids=options["position_ids"])[0]

    def change(self, hidden: torch.Tensor) -> dict[str, Any]:
        """What a step with `hidden` says of the rows and places before it; then the session is past that step."""
        change = {"start_position": self.position, "parents": self._parents}
        self._parents, self.rows = None, len(hidden)
        self.position += hidden.shape[1]
        return change

    def close(self) -> None:
        for engine, session in self.hops:
            engine.close(session).result(_SECONDS)


def together(work: Sequence[tuple[LocalSession, torch.Tensor]], **options: Any) -> list[torch.Tensor]:
    """A step of each session, all of them in the same rounds of every engine."""
    changes = [session.change(hidden) for session, hidden in work]
    outputs = [hidden for _, hidden in work]
    for hop in range(len(work[0][0].hops)):
        waiting: list[Future[StepOutput | LilliputError]] = []
        steps = []
        for (session, _), change, hidden in zip(work, changes, outputs, strict=True):
            waiting.append(Future())
            step = Step(hidden, done=waiting[-1].set_result, **change, **options)
            steps.append((session.hops[hop][1], step))
        work[0][0].hops[hop][0].submit_all(steps)
        results = [future.result(_SECONDS) for future in waiting]
        for result in results:
            if isinstance(result, LilliputError):
                raise result
        outputs = [result.hidden for result in results if isinstance(result, StepOutput)]
    return outputs


class _Dense(nn.Module):
    """Stands for `RemoteSequential`: whole rows through every span, without a cache.

    :ivar adapter: that they use
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        super().__init__()
        self._engines, self.adapter = engines, ""

    def forward(self, hidden: torch.Tensor, **options: Any) -> torch.Tensor:
        hidden = hidden.to(DEVICE)
        options = {name: x if x is None else x.to(DEVICE) for name, x in options.items()}
        for span in (engine.span for engine in self._engines):
            with span.on_device():
                hidden = span.dense(hidden, span.start, span.end, adapter=self.adapter, **options)
        return hidden.cpu()
