"""The training passes of an engine, which take turns with its rounds. Belongs to the engine's thread."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager

import torch

from lilliput.engine.counters import Counters
from lilliput.engine.training import Pass, check_pass, units
from lilliput.errors import LilliputError, ServerFailure
from lilliput.models.span import Span

logger = logging.getLogger(__name__)

#: while sessions are generating, training passes get about this share of the device's time
TRAINING_SHARE = 0.25
_MOST_CREDIT = 0.1


class Passes:
    """Those that are under way: a unit of each in turn, as far as the time that they may take allows.

    :param cores: for so many tokens: what to hold while they are computed
    """

    def __init__(self, span: Span, counters: Counters, cores: Callable[[int], AbstractContextManager[None]]) -> None:
        self._span, self._counters, self._cores = span, counters, cores
        self._running: deque[tuple[Pass, Generator[None, None, torch.Tensor]]] = deque()
        self._credit = 0.0

    def __len__(self) -> int:
        return len(self._running)

    def add(self, job: Pass) -> None:
        """Begin a pass; `job.done` is called with its result, or with what is wrong with it."""
        try:
            job.to(self._span.device)
            check_pass(job, self._span.hidden_size, self._span.dtype)
        except LilliputError as e:
            job.done(e)
            return
        except Exception as e:
            logger.exception("a training pass could not begin")
            job.done(ServerFailure(f"the server failed to begin this pass: {e}"))
            return
        self._running.append((job, units(job, self._span)))

    def credit_round(self, seconds: float) -> None:
        """A round of inference took so long."""
        self._credit = min(self._credit, _MOST_CREDIT) + seconds * TRAINING_SHARE

    def go_on(self) -> None:
        """Nobody is generating: take all the time."""
        self._credit = float("inf")

    def train(self) -> bool:
        """A unit of the oldest pass, if its turn has come."""
        if not self._running or self._credit <= 0:
            return False
        job, generator = self._running[0]
        if job.given_up:
            self._running.popleft()
            return True
        self._counters.units += 1
        begun = time.perf_counter()
        try:
            with self._cores(job.hidden.shape[0] * job.hidden.shape[1]):
                begun = time.perf_counter()
                next(generator)
            self._running.rotate(-1)
        except StopIteration as finished:
            self._running.popleft()
            job.done(finished.value.cpu())
        except Exception as e:
            logger.exception("a training pass failed")
            self._running.popleft()
            self._counters.failures += 1
            job.done(ServerFailure(f"the server failed to compute this pass: {e}"))
        if self._credit != float("inf"):
            self._credit -= time.perf_counter() - begun
        return True

    def end(self, why: LilliputError) -> None:
        """Tell all of them why they end."""
        for job, _ in self._running:
            job.done(why)
        self._running.clear()
