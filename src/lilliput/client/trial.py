"""What a chain really takes: a few steps of one token, timed."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from lilliput.client.async_session import AsyncInferenceSession
from lilliput.client.remote import RemoteModel
from lilliput.client.route import Hop

_WARM_UP_STEPS = 2
_STEPS = 7


@dataclass(frozen=True)
class Timing:
    """Medians over some steps of one token, in seconds.

    :ivar network: beyond what the servers say that they took
    :ivar compute: computing, and waiting for their turn
    """

    network: float
    compute: float

    @property
    def total(self) -> float:
        return self.network + self.compute


@dataclass(frozen=True)
class _Fixed(RemoteModel):
    """A remote model with but one chain."""

    hops: tuple[Hop, ...] = ()

    async def chain(self, *_: Any, **__: Any) -> list[Hop]:
        return list(self.hops)


async def time_chain(remote: RemoteModel, chain: Sequence[Hop], width: int, *, steps: int = _STEPS) -> Timing:
    """Open a short session along a chain and take some steps. Raises what sessions do.

    :param width: of the model's hidden states
    """
    known = {field.name: getattr(remote, field.name) for field in fields(remote)}
    fixed = _Fixed(**known, hops=tuple(chain))
    session = AsyncInferenceSession(fixed, chain[0].start, chain[-1].end, max_length=_WARM_UP_STEPS + steps)
    took: list[float] = []
    computed: list[float] = []
    try:
        for _ in range(_WARM_UP_STEPS + steps):
            hidden = torch.randn(1, 1, width)
            begun, before = time.perf_counter(), _server_seconds(session)
            await session.step(hidden)
            took.append(time.perf_counter() - begun)
            computed.append(_server_seconds(session) - before)
    finally:
        await session.close()
    pairs = list(zip(took, computed, strict=True))[_WARM_UP_STEPS:]
    return Timing(statistics.median(t - c for t, c in pairs), statistics.median(c for _, c in pairs))


async def time_hops(remote: RemoteModel, chain: Sequence[Hop], width: int, *, steps: int = _STEPS) -> list[Timing]:
    """The same for each server of the chain by itself: from the client to it and back."""
    return [await time_chain(remote, [hop], width, steps=steps) for hop in chain]


async def time_pushed(
    remote: RemoteModel, chain: Sequence[Hop], width: int, hops: Sequence[Timing], *, steps: int = _STEPS
) -> list[float]:
    """The ways of a step that servers push on, in seconds: to the first server, from each to the next, and back.

    Nobody has two clocks that agree, so they are differences: each server added to the chain makes it so much longer,
    but for the way back, of which half of there and back is known.

    :param remote: with push
    :param hops: what `time_hops` has found
    """
    arrival = [hops[0].network / 2]
    for count in range(2, len(chain) + 1):
        whole = await time_chain(remote, chain[:count], width, steps=steps)
        arrival.append(whole.network - hops[count - 1].network / 2)
    ways = [after - before for before, after in itertools.pairwise([0.0, *arrival])]
    return [*(max(way, 0.0) for way in ways), hops[-1].network / 2]


def _server_seconds(session: AsyncInferenceSession) -> float:
    return sum(stats.queued_ms + stats.compute_ms for stats in session.stats) / 1000
