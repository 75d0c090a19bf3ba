"""What the HTTP API adds to the Python client: the same streams through both, in alternating rounds.

`lilliput api` runs as a process of its own, as users run it. Who asks it, httpx in the benchmark's process, takes time
on the same cores: that is measured, too, and is not the API's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any

from lilliput.cli.bench.report import Figure
from lilliput.errors import LilliputError

#: the differences are smaller than the noise: so many pairs for each round
_PAIRS = 3
#: what `lilliput api` needs, and who asks it
_PACKAGES = ("fastapi", "uvicorn", "llguidance", "prometheus_client", "httpx")


def available() -> bool:
    return all(find_spec(name) is not None for name in _PACKAGES)


def measure(
    model: str,
    peers: Sequence[str],
    prompts: Callable[[int, int], list[list[int]]],
    ours: Callable[[list[list[int]], list[int]], None],
    *,
    new: int,
    dtype: str,
    rounds: int,
) -> list[Figure]:
    """One stream, and sixteen, of the likeliest tokens.

    :param prompts: so many, others for each number
    :param ours: the Python client's streams of so many tokens
    :param new: tokens of each stream; some may end before, and the Python client makes as many
    """
    one = Figure("api, one stream, overhead", "ms a token", note="beyond the Python client, round by round")
    many = Figure("api, 16 streams", "tokens/s", note="beside the Python client's 16 streams")
    with _api(model, peers, dtype) as (url, name):
        for count, figure in ((1, one), (16, many)):
            counts = [new] * count
            for number in range(1 + rounds * _PAIRS):
                here, there = prompts(count, 2 * number), prompts(count, 2 * number + 1)
                if number % 2:  # a machine that becomes slower, or faster, does so for both
                    python = _seconds(ours, here, counts) / sum(counts)
                counts, over_http = asyncio.run(_over_http(url, name, there, new))
                if not number % 2:
                    python = _seconds(ours, here, counts) / sum(counts)
                over_http /= sum(counts)
                if not number:  # the first round warms both up
                    continue
                if count == 1:
                    figure.values.append((over_http - python) * 1e3)
                else:
                    figure.values.append(1 / over_http)
                    figure.reference.append(1 / python)
    return [one, many]


def _seconds(work: Callable[..., None], *arguments: Any) -> float:
    begun = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - begun


async def _over_http(url: str, model: str, prompts: list[list[int]], new: int) -> tuple[list[int], float]:
    """How many tokens came, the ends' own among them, of streams over HTTP that began together, in how many seconds."""
    import httpx

    async def one(prompt: list[int]) -> int:
        asked: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": new, "temperature": 0}
        asked |= {"stream": True, "stream_options": {"include_usage": True}}
        ended, count = "", 0
        async with client.stream("POST", f"{url}/v1/completions", json=asked) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line.removeprefix("data: "))
                    ended = next((c["finish_reason"] for c in chunk["choices"] if c["finish_reason"]), ended)
                    count = (chunk["usage"] or {}).get("completion_tokens", 0)
        return count + (ended == "stop")

    async with httpx.AsyncClient(timeout=300.0, limits=httpx.Limits(max_connections=None)) as client:
        await client.get(f"{url}/health")
        begun = time.perf_counter()
        counts = await asyncio.gather(*map(one, prompts))
        return counts, time.perf_counter() - begun


@contextlib.contextmanager
def _api(model: str, peers: Sequence[str], dtype: str) -> Iterator[tuple[str, str]]:
    """A `lilliput api` process: its address, and the model's name there."""
    command = [sys.executable, "-m", "lilliput.cli", "api", model, "--port", "0", "--json", "--dtype", dtype]
    command += [argument for peer in peers for argument in ("--initial-peers", peer)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            if not line:
                raise LilliputError("`lilliput api` did not start")
            facts = json.loads(line)
            yield facts["url"], facts["model"]
        finally:
            process.terminate()
