"""A short measurement of an engine before it meets the network: how many threads to use, what sessions may expect."""

from __future__ import annotations

from concurrent.futures import Future

import torch

from lilliput.engine.engine import Engine
from lilliput.engine.session import CacheSession, Step, StepOutput
from lilliput.models.span import CPU

_PREFIX_TOKENS = 64
_DECODE_STEPS = 5
#: rounds of so many rows, one token each, are tried with different numbers of threads
_ROWS = (2, 8, 16)
_TRIES = 4
#: streams that come together
_TOGETHER = 8


def measure(engine: Engine) -> float:
    """Run some tokens through the whole span: `engine.threads` learn, `engine.rates` tell, kernels are warm.

    Returns tokens per second through the whole span when several streams come together.
    """
    room = engine.pages * engine.pool.page_size
    for rows in _ROWS:
        if rows <= engine.pages:
            _try_threads(engine, rows)
    together = throughput(engine)
    length = min(_PREFIX_TOKENS, room - _DECODE_STEPS)
    engine.rates.forget()
    with _Session(engine, 1, length + _DECODE_STEPS) as session:
        session.step(length)
        fastest = min(session.step(1).compute_seconds for _ in range(_DECODE_STEPS))
    # who starts is often disturbed by others who do, and would tell of it until it has served for a while
    engine.call(lambda: engine.rates.begin(fastest)).result()
    return together


def throughput(engine: Engine) -> float:
    """Tokens per second through the whole span when several streams come together."""
    rows = min(_TOGETHER, engine.pages)
    with _Session(engine, rows, engine.pool.page_size) as session:
        return rows / min(session.step(1).compute_seconds for _ in range(_TRIES))


def _try_threads(engine: Engine, rows: int) -> None:
    candidates = engine.threads.candidates()
    if len(candidates) == 1 or engine.span.device != CPU:
        return
    seconds: dict[int, float] = {}
    with _Session(engine, rows, engine.pool.page_size) as session:
        for count in candidates:
            engine.call(lambda count=count: engine.threads.fix(count)).result()  # type: ignore[misc]
            seconds[count] = min(session.step(1).compute_seconds for _ in range(_TRIES))
    engine.call(lambda: engine.threads.learn(rows, seconds)).result()


class _Session:
    """A session of zeros."""

    def __init__(self, engine: Engine, rows: int, max_length: int) -> None:
        self._engine, self._rows = engine, rows
        span = engine.span
        self._session: CacheSession = engine.open(span.start, span.end, rows=rows, max_length=max_length).result()

    def __enter__(self) -> _Session:
        return self

    def __exit__(self, *error: object) -> None:
        self._engine.close(self._session).result()

    def step(self, tokens: int) -> StepOutput:
        finished: Future[object] = Future()
        hidden = torch.zeros(self._rows, tokens, self._engine.span.hidden_size)
        self._engine.submit(self._session, Step(hidden, done=finished.set_result))
        result = finished.result()
        if isinstance(result, Exception):
            raise result
        assert isinstance(result, StepOutput)
        return result
