"""What breaks while it computes, or comes after the end, harms nobody else and leaves nobody waiting."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from lilliput.engine.engine import Engine
from lilliput.engine.session import CacheSession, Step, StepOutput
from lilliput.engine.training import Pass
from lilliput.errors import BadRequest, LilliputError, ServerFailure, SessionExpired
from lilliput.models.sources import resolve
from lilliput.models.span import Span

HIDDEN, MARK = 64, 12345.0


@pytest.fixture
def engine(tiny_llama: Path) -> Iterator[Engine]:
    engine = Engine(Span.load(resolve(str(tiny_llama)), 0, 2, dtype=torch.float32), pages=40, page_size=16)
    engine.start()
    yield engine
    engine.stop()


def submit(engine: Engine, session: CacheSession, hidden: torch.Tensor, **options: Any) -> Future[Any]:
    future: Future[Any] = Future()
    engine.submit(session, Step(hidden, done=future.set_result, **options))
    return future


def opened(engine: Engine, **options: int) -> CacheSession:
    return engine.open(0, 2, **{"rows": 1, "max_length": 100, **options}).result(10)


@pytest.fixture
def fragile(engine: Engine) -> Engine:
    """Its span cannot bear a certain number."""
    paged = engine.span.paged

    def fragile_paged(hidden: torch.Tensor, *args: Any) -> torch.Tensor:
        if bool((hidden == MARK).any()):
            raise RuntimeError("too much")
        return paged(hidden, *args)

    engine.span.paged = fragile_paged  # type: ignore[method-assign]
    return engine


def test_one_step_that_breaks_a_round_does_not_break_the_others(fragile: Engine) -> None:
    sessions = [opened(fragile) for _ in range(4)]
    for session in sessions:
        submit(fragile, session, torch.randn(1, 5, HIDDEN)).result(10)
    gate = threading.Event()
    fragile.call(gate.wait)
    inputs = [torch.randn(1, 1, HIDDEN) for _ in sessions]
    inputs[2] += MARK
    inputs[2][:] = MARK
    results = [submit(fragile, session, hidden) for session, hidden in zip(sessions, inputs, strict=True)]
    gate.set()
    answers = [result.result(10) for result in results]
    assert [isinstance(answer, StepOutput) for answer in answers] == [True, True, False, True]
    assert isinstance(answers[2], ServerFailure)
    assert "too much" in str(answers[2])
    assert submit(fragile, sessions[2], torch.randn(1, 1, HIDDEN)).result(10).length == 6
    assert fragile.counters.failures == 1


def test_a_failed_step_leaves_the_page_behind_its_last_token_empty(engine: Engine) -> None:
    session = opened(engine, rows=2)
    submit(engine, session, torch.randn(2, 5, HIDDEN)).result(10)
    enormous = torch.full((2, 3, HIDDEN), 3e38)
    answer = submit(engine, session, enormous, prompts=torch.full((2, 2, 3, HIDDEN), 3e38)).result(10)
    assert isinstance(answer, ServerFailure)

    def leftovers() -> list[float]:
        pages = [row[0] for row in session.tables[0].rows]
        return [float(engine.cache.blocks[block][page, :, 5:].abs().sum()) for block in (0, 1) for page in pages]

    assert engine.call(leftovers).result(10) == [0.0] * 4


def test_a_step_that_cannot_even_begin(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    broken, sound = opened(engine), opened(engine)
    monkeypatch.setattr(broken.tables[0], "grow", lambda start, length: 1 / 0)
    assert isinstance(submit(engine, broken, torch.randn(1, 1, HIDDEN)).result(10), ServerFailure)
    assert isinstance(submit(engine, sound, torch.randn(1, 1, HIDDEN)).result(10), StepOutput)


def test_an_action_that_fails_tells_its_caller_and_no_other(engine: Engine) -> None:
    with pytest.raises(ZeroDivisionError):
        engine.call(lambda: 1 / 0).result(10)
    assert engine.call(lambda: 2).result(10) == 2


def test_a_call_that_was_cancelled_is_not_made(engine: Engine) -> None:
    gate, made = threading.Event(), []
    engine.call(gate.wait)
    future = engine.call(lambda: made.append(1))
    assert future.cancel()
    gate.set()
    assert engine.call(lambda: 2).result(10) == 2
    assert not made


def test_a_pass_that_breaks(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    dense = engine.span.dense

    def fragile_dense(hidden: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if bool((hidden == MARK).any()):
            raise RuntimeError("too much")
        return dense(hidden, *args, **options)

    monkeypatch.setattr(engine.span, "dense", fragile_dense)
    results: list[Future[Any]] = [Future() for _ in range(3)]
    for result, value in zip(results, (1.0, MARK, 2.0), strict=True):
        engine.run_pass(Pass(0, 2, torch.full((1, 2, HIDDEN), value), done=result.set_result))
    answers = [result.result(10) for result in results]
    assert [isinstance(answer, torch.Tensor) for answer in answers] == [True, False, True]
    assert isinstance(answers[1], ServerFailure)


def test_a_pass_that_nobody_waits_for_is_not_computed(engine: Engine) -> None:
    gate = threading.Event()
    engine.call(gate.wait)
    job = Pass(0, 2, torch.randn(1, 2, HIDDEN))
    engine.run_pass(job)
    job.given_up = True
    result: Future[Any] = Future()
    engine.run_pass(Pass(0, 2, torch.randn(1, 2, HIDDEN), done=result.set_result))
    gate.set()
    result.result(10)
    assert engine.counters.units == 3  # two blocks, and one look at the end


def test_whoever_waits_when_the_engine_stops_is_told(engine: Engine) -> None:
    session = opened(engine)
    gate = threading.Event()
    engine.call(gate.wait)
    waiting = submit(engine, session, torch.randn(1, 1, HIDDEN))
    training: Future[Any] = Future()
    engine.run_pass(Pass(0, 2, torch.randn(1, 2, HIDDEN), done=training.set_result))
    stopping = threading.Thread(target=engine.stop)
    stopping.start()
    gate.set()
    stopping.join(10)
    for answer in (waiting.result(10), training.result(10)):
        assert isinstance(answer, StepOutput | torch.Tensor | SessionExpired)
    assert engine.pool.used == 0


def test_whoever_comes_after_the_end_is_told(engine: Engine) -> None:
    session = opened(engine)
    engine.stop()
    engine.stop()
    assert isinstance(submit(engine, session, torch.randn(1, 1, HIDDEN)).result(10), SessionExpired)
    training: Future[Any] = Future()
    engine.run_pass(Pass(0, 2, torch.randn(1, 2, HIDDEN), done=training.set_result))
    assert isinstance(training.result(10), LilliputError)
    engine.close(session).result(10)
    assert engine.call(lambda: 2).result(10) == 2


def test_an_engine_that_breaks_leaves_nobody_waiting(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    session = opened(engine)
    monkeypatch.setattr(engine, "_round", lambda: 1 / 0)
    assert isinstance(submit(engine, session, torch.randn(1, 1, HIDDEN)).result(10), SessionExpired)
    assert isinstance(submit(engine, session, torch.randn(1, 1, HIDDEN)).result(10), SessionExpired)
    engine.close(session).result(10)


def test_a_repeated_step_is_computed_once(engine: Engine) -> None:
    session = opened(engine)
    hidden = torch.randn(1, 2, HIDDEN)
    gate = threading.Event()
    engine.call(gate.wait)
    answers = [submit(engine, session, hidden, step_id=1) for _ in range(3)]
    gate.set()
    assert len({id(answer.result(10)) for answer in answers}) == 1
    assert submit(engine, session, hidden, step_id=1).result(10) is answers[0].result(10)
    assert submit(engine, session, hidden, step_id=2).result(10).length == 4
    assert isinstance(submit(engine, session, hidden, step_id=1).result(10), BadRequest)
    assert engine.counters.tokens == 4
