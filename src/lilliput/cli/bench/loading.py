"""How long a span takes from its files to its first pass, and how much memory that takes: in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys

from lilliput.cli.bench.report import Figure
from lilliput.models import quantization
from lilliput.models.span import CPU

#: name, dtype, weights
_PRECISIONS = (
    ("bfloat16", "bfloat16", None),
    ("float32", "float32", None),
    ("int8", "bfloat16", "int8"),
    ("int4", "bfloat16", "int4"),
    ("nf4", "bfloat16", "nf4"),
)
_LOAD = """
import gc, json, sys, threading, time
begun = time.perf_counter()
import torch
from lilliput.models.plan import block_bytes
from lilliput.models.sources import resolve
from lilliput.models.span import Span

def resident():
    # all of it: what the process has taken, and the pages of files that it has mapped
    with open("/proc/self/statm") as status:
        return int(status.read().split()[1]) * 4096

model, start, end, dtype, quantize = json.loads(sys.argv[1])
options = {"dtype": getattr(torch, dtype), "quantize": quantize}
files = resolve(model, weights=False)
files.fetch((start, end))
Span.load(files, start, start + 1, **options)  # the family's code, and the kernels that are compiled at first use
gc.collect()
libraries = time.perf_counter() - begun
before, most, done = resident(), 0, threading.Event()

def watch():
    global most
    while not done.wait(0.0005):
        most = max(most, resident())

watcher = threading.Thread(target=watch)
watcher.start()
loading = time.perf_counter()
files = resolve(model, weights=False)
files.fetch((start, end))
span = Span.load(files, start, end, **options)
ready = time.perf_counter() - loading
done.set()
watcher.join()
facts = files.facts().blocks[start:end]
weights = sum(block_bytes(block, dtype, quantize) for block in facts)
largest = max(block.largest for block in facts) * options["dtype"].itemsize
print(json.dumps([libraries, ready, *(size / 2**20 for size in (most - before, weights, largest))]))
"""


def loading(model: str, span: tuple[int, int], rounds: int) -> list[Figure]:
    """In each precision: seconds until the span has computed, MiB taken at most, and what its weights are."""
    figures: list[Figure] = []
    for name, *precision in _PRECISIONS:
        if not quantization.is_here(precision[1], CPU):
            continue
        note = f"blocks {span[0]}:{span[1]} on disk"
        libraries = Figure("loading, libraries", "s", note="torch, transformers, Lilliput, a first block")
        seconds = Figure(f"loading in {name}", "s", note=note)
        memory = Figure(f"loading in {name}, resident at most", "MiB")
        for _ in range(rounds):
            command = [sys.executable, "-c", _LOAD, json.dumps([model, *span, *precision])]
            shown = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True, text=True)
            took, ready, most, weights, largest = json.loads(shown.stdout)
            libraries.values.append(took)
            seconds.values.append(ready)
            memory.values.append(most)
            memory.note = f"of {weights:.1f} weights, {largest:.1f} the largest tensor"
        figures += [seconds, memory] if figures else [libraries, seconds, memory]
    return figures
