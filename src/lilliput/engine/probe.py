"""A moment's measurement of an engine before it meets the network: what a session may expect, and warm kernels."""

from __future__ import annotations

from concurrent.futures import Future

import torch

from lilliput.engine.engine import Engine
from lilliput.engine.session import Step

_PREFIX_TOKENS = 64
_DECODE_STEPS = 3


def measure(engine: Engine) -> None:
    """Run a short prefix and some tokens through the whole span, so that `engine.rates` tell something."""
    span = engine.span
    length = min(_PREFIX_TOKENS, engine.pool.count * engine.pool.page_size - _DECODE_STEPS)
    session = engine.open(span.start, span.end, rows=1, max_length=length + _DECODE_STEPS).result()
    try:
        for tokens in (length, *[1] * _DECODE_STEPS):
            finished: Future[object] = Future()
            engine.submit(session, Step(torch.zeros(1, tokens, span.hidden_size), done=finished.set_result))
            result = finished.result()
            if isinstance(result, Exception):
                raise result
    finally:
        engine.close(session).result()
