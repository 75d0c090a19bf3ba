"""Right is defined by the whole model: whatever was sliced, packed, rolled back, reordered, shared or closed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from transformers import LlamaModel

from lilliput.engine.engine import Engine
from lilliput.engine.scheduler import Budget
from lilliput.engine.session import CacheSession, Step, StepOutput
from lilliput.errors import LilliputError
from lilliput.models.sources import resolve
from lilliput.models.span import Span

BLOCKS = 6
PAGES = 120
TOLERANCE = 2e-4


@pytest.fixture(scope="module", params=["fused", "family"])
def engine(request: pytest.FixtureRequest, tiny_llama: Path) -> Iterator[Engine]:
    span = Span.load(resolve(str(tiny_llama)), 0, BLOCKS, dtype=torch.float32, fuse=request.param == "fused")
    assert span.fused == (request.param == "fused")
    # small pages and budgets, so that every boundary is crossed often
    engine = Engine(span, pages=PAGES, page_size=16, budget=Budget(alone=24, beside_decode=7))
    engine.start()
    yield engine
    engine.stop()


@pytest.fixture(scope="module")
def whole(tiny_llama: Path) -> torch.nn.Module:
    model = LlamaModel.from_pretrained(tiny_llama, dtype=torch.float32, attn_implementation="eager")
    model.norm = torch.nn.Identity()
    return model.eval()


def run(engine: Engine, session: CacheSession, hidden: torch.Tensor, **options: object) -> StepOutput:
    """One step, awaited; raises what the engine reports."""
    return submit(engine, session, hidden, **options)()


def submit(engine: Engine, session: CacheSession, hidden: torch.Tensor, **options: object):  # type: ignore[no-untyped-def]
    future: Future[StepOutput | LilliputError] = Future()
    engine.submit(session, Step(hidden, done=future.set_result, **options))  # type: ignore[arg-type]

    def result() -> StepOutput:
        got = future.result(timeout=60)
        if isinstance(got, LilliputError):
            raise got
        return got

    return result


@torch.no_grad()
def reference(whole: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    return whole(inputs_embeds=hidden, use_cache=False).last_hidden_state


@dataclass
class Shadow:
    """What a session's cache must be equivalent to: all inputs so far, [rows, length, hidden]."""

    session: CacheSession
    max_length: int
    inputs: torch.Tensor = field(default_factory=lambda: torch.zeros(0, 0, 64))

    @property
    def length(self) -> int:
        return self.inputs.shape[1]


def interleavings(engine: Engine, whole: torch.nn.Module) -> type[RuleBasedStateMachine]:
    class Interleavings(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.shadows: list[Shadow] = []
            self.generator = torch.Generator().manual_seed(0)

        def random(self, *shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=self.generator)

        @precondition(lambda self: len(self.shadows) < 5)
        @rule(rows=st.integers(1, 3), prefix=st.integers(1, 40))
        def open(self, rows: int, prefix: int) -> None:
            session = engine.open(0, BLOCKS, rows=rows, max_length=70).result(10)
            shadow = Shadow(session, 70, torch.zeros(rows, 0, 64))
            self.shadows.append(shadow)
            self.check([(shadow, self.random(rows, prefix, 64), {})])

        @precondition(lambda self: self.shadows)
        @rule(data=st.data())
        def step_together(self, data: st.DataObject) -> None:
            chosen = data.draw(st.lists(st.sampled_from(range(len(self.shadows))), unique=True, min_size=1))
            work = []
            for index in chosen:
                shadow = self.shadows[index]
                room = shadow.max_length - shadow.length
                if room:
                    tokens = data.draw(st.sampled_from([1, 1, 1, min(room, 5), min(room, 20)]))
                    work.append((shadow, self.random(shadow.inputs.shape[0], tokens, 64), {}))
            self.check(work)

        @precondition(lambda self: self.shadows)
        @rule(data=st.data(), tokens=st.integers(1, 9))
        def roll_back(self, data: st.DataObject, tokens: int) -> None:
            shadow = data.draw(st.sampled_from(self.shadows))
            position = data.draw(st.integers(0, shadow.length))
            tokens = min(tokens, shadow.max_length - position)
            if tokens:
                shadow.inputs = shadow.inputs[:, :position]
                hidden = self.random(shadow.inputs.shape[0], tokens, 64)
                self.check([(shadow, hidden, {"start_position": position})])

        @precondition(lambda self: self.shadows)
        @rule(data=st.data(), tokens=st.integers(1, 3))
        def reorder(self, data: st.DataObject, tokens: int) -> None:
            shadow = data.draw(st.sampled_from(self.shadows))
            rows = data.draw(st.integers(1, shadow.session.max_rows))
            parent = st.integers(0, shadow.inputs.shape[0] - 1)
            parents = data.draw(st.lists(parent, min_size=rows, max_size=rows))
            tokens = min(tokens, shadow.max_length - shadow.length)
            if tokens:
                shadow.inputs = shadow.inputs[parents]
                self.check([(shadow, self.random(rows, tokens, 64), {"parents": parents})])

        @precondition(lambda self: self.shadows)
        @rule(data=st.data())
        def close(self, data: st.DataObject) -> None:
            shadow = data.draw(st.sampled_from(self.shadows))
            self.shadows.remove(shadow)
            engine.close(shadow.session).result(10)

        def check(self, work: list[tuple[Shadow, torch.Tensor, dict[str, object]]]) -> None:
            pending = [submit(engine, shadow.session, hidden, **options) for shadow, hidden, options in work]
            for (shadow, hidden, _), result in zip(work, pending, strict=True):
                shadow.inputs = torch.cat([shadow.inputs, hidden], dim=1)
                output = result()
                expected = reference(whole, shadow.inputs)[:, -hidden.shape[1] :]
                assert output.length == shadow.length
                error = (output.hidden - expected).abs().max() / expected.abs().max()
                assert error < TOLERANCE

        @invariant()
        def no_page_is_lost(self) -> None:
            engine.call(engine.pool.check).result(10)

        def teardown(self) -> None:
            for shadow in self.shadows:
                engine.close(shadow.session).result(10)
            assert engine.call(lambda: engine.pool.used).result(10) == 0

    return Interleavings


def test_any_interleaving_of_sessions_equals_the_plain_model(engine: Engine, whole: torch.nn.Module) -> None:
    run_state_machine_as_test(
        interleavings(engine, whole),
        settings=settings(
            max_examples=25,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            derandomize=True,
        ),
    )


def test_steps_that_wait_together_run_in_one_pass(engine: Engine) -> None:
    sessions = [engine.open(0, BLOCKS, rows=1, max_length=32).result(10) for _ in range(6)]
    for session in sessions:
        run(engine, session, torch.randn(1, 3, 64))
    gate = threading.Event()
    engine.call(gate.wait)  # the engine is busy while six steps arrive
    rounds = engine.counters.rounds
    pending = [submit(engine, session, torch.randn(1, 1, 64)) for session in sessions]
    gate.set()
    for result in pending:
        result()
    assert engine.counters.rounds == rounds + 1
    for session in sessions:
        engine.close(session).result(10)


def test_a_long_prefix_does_not_hold_up_those_who_generate(engine: Engine) -> None:
    talker = engine.open(0, BLOCKS, rows=1, max_length=64).result(10)
    reader = engine.open(0, BLOCKS, rows=1, max_length=512).result(10)
    run(engine, talker, torch.randn(1, 3, 64))
    order: list[str] = []
    gate = threading.Event()
    engine.call(gate.wait)
    future: Future[object] = Future()
    engine.submit(
        reader, Step(torch.randn(1, 500, 64), done=lambda result: (order.append("prefix"), future.set_result(result)))
    )
    last: Future[object] = Future()

    def again(result: object) -> None:
        order.append("token")
        if order.count("token") < 5:
            engine.submit(talker, Step(torch.randn(1, 1, 64), done=again))
        else:
            last.set_result(result)

    engine.submit(talker, Step(torch.randn(1, 1, 64), done=again))
    gate.set()
    last.result(30)
    future.result(30)
    assert order == ["token"] * 5 + ["prefix"]
    for session in (talker, reader):
        engine.close(session).result(10)


def test_a_mask_that_looks_ahead_and_deep_prompts_equal_the_plain_model(engine: Engine, whole: torch.nn.Module) -> None:
    hidden, prompts = torch.randn(2, 30, 64), torch.randn(BLOCKS, 2, 30, 64) * 0.1
    mask = torch.rand(2, 30, 30) > 0.5
    mask |= torch.eye(30, dtype=torch.bool)
    positions = torch.stack([torch.arange(30), torch.arange(30) + 7])
    session = engine.open(0, BLOCKS, rows=2, max_length=64).result(10)
    got = run(engine, session, hidden, mask=mask, prompts=prompts, position_ids=positions).hidden
    handles = [
        layer.register_forward_pre_hook(
            lambda module, args, kwargs, i=i: ((args[0] + prompts[i], *args[1:]), kwargs), with_kwargs=True
        )
        for i, layer in enumerate(whole.layers)
    ]
    bias = torch.zeros(2, 1, 30, 30).masked_fill(~mask[:, None], torch.finfo(torch.float32).min)
    with torch.no_grad():
        expected = whole(inputs_embeds=hidden, attention_mask=bias, position_ids=positions, use_cache=False)[0]
    for handle in handles:
        handle.remove()
    assert (got - expected).abs().max() / expected.abs().max() < TOLERANCE
    engine.close(session).result(10)
