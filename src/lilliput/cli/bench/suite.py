"""The measures, in the order in which they are taken."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from lilliput.cli.bench import http_api, quality, wide_area
from lilliput.cli.bench.loading import loading
from lilliput.cli.bench.recovery import recovery
from lilliput.cli.bench.reference import Reference
from lilliput.cli.bench.report import Figure, Report
from lilliput.cli.local_swarm import LocalServer, LocalSwarm
from lilliput.client.decoder import Decoder
from lilliput.client.model import AutoDistributedModelForCausalLM
from lilliput.client.sequential import RemoteSequential
from lilliput.models.sources import ModelFiles, resolve

_PROMPT_TOKENS = 16
_NEW_TOKENS = 48
_TRAINING = (8, 128)
_HOPS = 3
_HOP_STEPS = 200
#: measures that need no swarm, or one of their own
_BY_THEMSELVES = {"server start", "loading", "recovery", "a hop", "quality", "wide-area"}


def run(report: Report, *, rounds: int, only: Sequence[str], with_reference: bool) -> None:
    """Take all figures whose name contains one of `only` (all if empty)."""

    def wanted(name: str) -> bool:
        return not only or any(part in name for part in only)

    files = resolve(report.model)
    blocks = files.blocks
    edges = [blocks * i // report.servers for i in range(report.servers + 1)]
    spans = list(itertools.pairwise(edges))
    if not only or set(only) - _BY_THEMSELVES:
        with _started(files, spans, report) as (swarm, suite):
            reference = Reference(str(files.path), report.dtype) if with_reference else None
            try:
                for name, unit, amount, ours, theirs in suite.throughputs():
                    if wanted(name):
                        _say(name)
                        report.add(_side_by_side(name, unit, amount, ours, theirs, reference, rounds))
            finally:
                if reference is not None:
                    reference.close()
            if wanted("api"):
                if http_api.available():
                    _say("the HTTP API")
                    report.figures.extend(suite.over_http(swarm, report, rounds))
                else:
                    _say("the HTTP API is left out: it needs httpx and lilliput[api]")
            if wanted("client start"):
                _say("client start")
                report.add(_client_start(files, swarm, report.dtype, with_reference, min(rounds, 3)))
            if wanted("a server"):
                _say("processes and memory")
                report.figures.extend(_size_of(swarm.servers))
    if wanted("server start"):
        _say("server start")
        report.add(_server_start(report, spans[0], min(rounds, 3)))
    if wanted("loading"):
        _say("loading")
        report.figures.extend(loading(report.model, spans[len(spans) // 2], min(rounds, 3)))
    if wanted("recovery"):
        _say("recovery")
        report.figures.extend(recovery(report.model, blocks, report.dtype, _codec(report.dtype), min(rounds, 3)))
    if wanted("a hop"):
        _say("what a hop adds")
        report.add(_hop(rounds))
    if "quality" in only:  # takes minutes, and asks for memory
        _say("quality of fewer bits")
        report.figures.extend(quality.measure(report.model, rounds))
    if wanted("wide-area"):
        _say("a wide-area network")
        codec = _codec(report.dtype)
        report.figures.extend(wide_area.measure(report.model, blocks, min(rounds, 3), dtype=report.dtype, codec=codec))


@contextlib.contextmanager
def _started(files: ModelFiles, spans: list[tuple[int, int]], report: Report) -> Iterator[tuple[LocalSwarm, _Suite]]:
    _say(f"{len(spans)} servers start")
    with LocalSwarm(report.model, spans, options=["--dtype", report.dtype]) as swarm:
        model = AutoDistributedModelForCausalLM.from_pretrained(
            report.model, initial_peers=swarm.initial_peers, dtype=report.dtype, codec=_codec(report.dtype)
        )
        suite = _Suite(model)
        try:
            yield swarm, suite
        finally:
            suite.close()


def _codec(dtype: str) -> str:
    return dtype if dtype in ("bfloat16", "float16") else "none"


Measure = tuple[str, str, float, Callable[[int], None], tuple[str, dict[str, Any]]]


class _Suite:
    """What is measured through the client. Every measure is a function of the round's number."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._decoder = Decoder(model)

    def close(self) -> None:
        self._decoder.close()
        self._model.close()

    def throughputs(self) -> Iterator[Measure]:
        """Name, unit, amount per call, our function, transformers' measure and its options."""
        new, prompt = _NEW_TOKENS, _PROMPT_TOKENS

        def generate(rows: int, prompt: int, new: int) -> tuple[str, dict[str, Any]]:
            return "generate", {"rows": rows, "prompt": prompt, "new": new, "seed": 0}

        yield "one stream", "tokens/s", new, lambda r: self._generate(prompt, new, r), generate(1, prompt, new)
        for n in (4, 8, 16):
            yield f"{n} streams", "tokens/s", n * new, lambda r, n=n: self._streams(n, r), generate(n, prompt, new)  # type: ignore[misc]
        for n in (128, 1024):
            yield f"prompt of {n}", "tokens/s", n, lambda r, n=n: self._generate(n, 1, r), generate(1, n, 1)  # type: ignore[misc]
        rows, tokens = _TRAINING
        shape = {"rows": rows, "tokens": tokens}
        for name, backward in (("forward", False), ("forward and backward", True)):
            yield (
                f"{name} {rows} x {tokens}",
                "tokens/s",
                rows * tokens,
                lambda r, backward=backward: self._blocks(backward),  # type: ignore[misc]
                ("blocks", {**shape, "backward": backward}),
            )

    def over_http(self, swarm: LocalSwarm, report: Report, rounds: int) -> list[Figure]:
        """The HTTP API beside the Python client."""

        def prompts(count: int, number: int) -> list[list[int]]:
            found: list[list[int]] = self._ids(count, _PROMPT_TOKENS, number).tolist()
            return found

        peers = swarm.initial_peers
        return http_api.measure(report.model, peers, prompts, self._play, new=_NEW_TOKENS, dtype=report.dtype,
                                rounds=rounds)  # fmt: skip

    def _ids(self, rows: int, tokens: int, seed: int) -> torch.Tensor:
        # new ones each time: servers remember prefixes, and that is not what is measured here
        generator = torch.Generator().manual_seed(1000 * rows + 7 * tokens + seed)
        return torch.randint(10, self._model.config.vocab_size - 10, (rows, tokens), generator=generator)

    def _generate(self, prompt: int, new: int, seed: int) -> None:
        ids = self._ids(1, prompt, seed)
        mask = torch.ones_like(ids)
        self._model.generate(ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False)

    def _streams(self, count: int, seed: int) -> None:
        self._play(self._ids(count, _PROMPT_TOKENS, seed).tolist(), [_NEW_TOKENS] * count)

    def _play(self, prompts: list[list[int]], counts: list[int]) -> None:
        """Streams of so many tokens, all at once."""

        async def one(prompt: list[int], count: int) -> int:
            return sum([1 async for _ in self._decoder.stream(prompt, max_new_tokens=count)])

        async def all_of_them() -> list[int]:
            return await asyncio.gather(*map(one, prompts, counts))

        assert self._decoder.run(all_of_them()) == counts

    def _blocks(self, backward: bool) -> None:
        hidden = torch.randn(*_TRAINING, self._model.config.hidden_size, dtype=self._model.dtype) * 0.1
        hidden.requires_grad_(backward)
        out = self._model.remote(hidden)
        if backward:
            out.backward(torch.ones_like(out))


def _side_by_side(
    name: str,
    unit: str,
    amount: float,
    ours: Callable[[int], None],
    theirs: tuple[str, dict[str, Any]],
    reference: Reference | None,
    rounds: int,
) -> Figure:
    figure = Figure(name, unit)
    for number in range(rounds + 1):
        begun = time.perf_counter()
        ours(number)
        took = time.perf_counter() - begun
        reference_took = reference.measure(theirs[0], **theirs[1]) if reference is not None else None
        if number:  # the first round warms both up
            figure.values.append(amount / took)
            if reference_took is not None:
                figure.reference.append(amount / reference_took)
    return figure


_FIRST_TOKEN = """
import sys
folder, dtype, *peers = sys.argv[1:]
if peers:
    from lilliput import AutoDistributedModelForCausalLM
    model = AutoDistributedModelForCausalLM.from_pretrained(folder, initial_peers=peers, dtype=dtype)
else:
    import torch, transformers
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
import torch
ids = torch.tensor([[1, 4093, 198, 1780, 314, 260, 3575]])
model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False)
print("token", flush=True)
"""


def _client_start(files: ModelFiles, swarm: LocalSwarm, dtype: str, with_reference: bool, rounds: int) -> Figure:
    figure = Figure("client start to first token", "s", note="Python, imports, loading the ends, joining")
    for _ in range(rounds):
        figure.values.append(_first_line_seconds([str(files.path), dtype, *swarm.initial_peers]))
        if with_reference:
            figure.reference.append(_first_line_seconds([str(files.path), dtype]))
    return figure


def _first_line_seconds(arguments: list[str]) -> float:
    begun = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-c", _FIRST_TOKEN, *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        took = time.perf_counter() - begun
        process.stdout.read()
    if process.returncode:
        raise RuntimeError(f"the client process failed with code {process.returncode}")
    return took


def _server_start(report: Report, span: tuple[int, int], rounds: int) -> Figure:
    figure = Figure("server start to first answer", "s", note=f"blocks {span[0]}:{span[1]} on disk")
    for _ in range(rounds):
        with LocalSwarm(report.model, [span], options=["--dtype", report.dtype]) as swarm:
            server = swarm.servers[0]
            remote = RemoteSequential.from_pretrained(report.model, initial_peers=swarm.initial_peers)
            with contextlib.closing(remote):
                part = remote[span[0] : span[1]]
                hidden = torch.zeros(1, 1, resolve(report.model).hidden_size)
                part(hidden)  # the client's own start is another figure
                begun = time.perf_counter()
                part(hidden)
                figure.values.append(server.start_seconds + time.perf_counter() - begun)
    return figure


def _size_of(servers: Sequence[LocalServer]) -> list[Figure]:
    processes = Figure("processes a server", "", note="one, and its p2p daemon")
    memory = Figure("memory a server", "MiB resident")
    for server in servers:
        family = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
        processes.values.append(len(family))
        memory.values.append(sum(process.memory_info().rss for process in family) / 2**20)
    return [processes, memory]


def _hop(rounds: int) -> Figure:
    """A model of small blocks with SmolLM2's width: what is left of a step when compute is taken away."""
    from transformers import LlamaConfig, LlamaForCausalLM

    figure = Figure("a hop adds", "ms", note="a step's time beyond compute, per server")
    config = LlamaConfig(
        hidden_size=576,
        intermediate_size=32,
        num_attention_heads=9,
        num_key_value_heads=3,
        num_hidden_layers=_HOPS,
        vocab_size=64,
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "hops"
        LlamaForCausalLM(config).save_pretrained(path)
        spans = [(i, i + 1) for i in range(_HOPS)]
        with LocalSwarm(str(path), spans) as swarm:
            model = AutoDistributedModelForCausalLM.from_pretrained(str(path), initial_peers=swarm.initial_peers)
            try:
                for _ in range(rounds):
                    figure.values.append(_hop_milliseconds(model))
            finally:
                model.close()
    return figure


def _hop_milliseconds(model: Any) -> float:
    hidden = torch.randn(1, 1, 576)
    with model.inference_session(max_length=_HOP_STEPS + 10) as session:
        for _ in range(10):
            session.step(hidden)
        before = sum(hop.compute_ms for hop in session.stats)
        took = []
        for _ in range(_HOP_STEPS):
            begun = time.perf_counter()
            session.step(hidden)
            took.append(time.perf_counter() - begun)
        compute = (sum(hop.compute_ms for hop in session.stats) - before) / _HOP_STEPS
    return (statistics.median(took) * 1e3 - compute) / _HOPS


def _say(what: str) -> None:
    print(f"  {what} ...", file=sys.stderr, flush=True)
