"""How many tokens a second could pass through servers, if routes shared them out as well as can be."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

#: a server's span `[start, end)`, and its tokens a second through one block
Capacity = tuple[int, int, float]


def most_throughput(servers: Iterable[Capacity], blocks: int) -> float:
    """Tokens per second through the whole model: the exact maximum over all ways to use each server's blocks.

    For any set of blocks, each token takes as much work as there are blocks in it, and only servers that hold one of
    them can do it. The maximum is the least, over all sets, of these servers' rates through the number of blocks
    (Hall's theorem). Spans are intervals, so what a further block adds depends on the one before it alone, and the
    least set is a shortest path; Dinkelbach's method finds the least ratio.
    """
    # further[a + 1, b]: the rates of servers that hold block b and not block a before it (a = -1: of all that hold b)
    further = np.zeros((blocks + 1, blocks))
    for start, end, rate in servers:
        further[: start + 1, start:end] += rate
    ratio = float(further[0].sum())
    while True:
        # best[b + 1]: rates minus ratio x blocks of the best set whose last block is b; best[0]: of the empty set
        best, came = np.zeros(blocks + 1), np.zeros(blocks, dtype=np.intp)
        for b in range(blocks):
            ways = best[: b + 1] + further[: b + 1, b]
            came[b] = ways.argmin()
            best[b + 1] = ways[came[b]] - ratio
        at = int(best[1:].argmin()) + 1
        if best[at] >= -1e-9 * max(ratio, 1.0):
            return ratio
        size, work = 0, 0.0
        while at:
            before = int(came[at - 1])
            size, work = size + 1, work + float(further[before, at - 1])
            at = before
        ratio = work / size
