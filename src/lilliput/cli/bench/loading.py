"""How long a span takes from its files to its first pass, and how much memory that takes: in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys

from lilliput.cli.bench.report import Figure

_LOAD = """
import json, sys, threading, time
begun = time.perf_counter()
import torch
from lilliput.models.sources import resolve
from lilliput.models.span import Span
from lilliput.models.memory import keep_freed_memory
imported = time.perf_counter()

def anonymous():
    # what the process has taken; pages of the files themselves are the system's to give away again
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))

before, most, done = anonymous(), [0], threading.Event()
def watch():
    while not done.wait(0.001):
        most[0] = max(most[0], anonymous())
watcher = threading.Thread(target=watch)
watcher.start()
model, start, end, dtype = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), getattr(torch, sys.argv[4])
loading = time.perf_counter()
files = resolve(model, weights=False)
files.fetch((start, end))
span = Span.load(files, start, end, dtype=dtype)
ready = time.perf_counter()
done.set()
watcher.join()
from lilliput.models.plan import block_bytes
weights = sum(block_bytes(b, sys.argv[4]) for b in files.facts().blocks[start:end])
print(json.dumps([imported - begun, ready - loading, (most[0] - before) / 2**20, weights / 2**20]))
"""


def loading(model: str, span: tuple[int, int], dtype: str, rounds: int) -> list[Figure]:
    """Seconds for libraries and for the span, and MiB of memory taken at most beside the span's own size."""
    note = f"blocks {span[0]}:{span[1]} on disk"
    figures = [
        Figure("loading, libraries", "s", note="torch, transformers, Lilliput"),
        Figure("loading, a span", "s", note=note),
        Figure("loading, memory taken at most", "MiB", note=note),
        Figure("loading, the span's weights", "MiB"),
    ]
    for _ in range(rounds):
        command = [sys.executable, "-c", _LOAD, model, str(span[0]), str(span[1]), dtype]
        shown = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True, text=True)
        for figure, value in zip(figures, json.loads(shown.stdout), strict=True):
            figure.values.append(value)
    return figures
