"""Spans of blocks with windows and blocks without: whatever happens to sessions, they compute what transformers does,
and hold no more pages than their blocks look at."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from families import BLOCKS, FAMILIES, WINDOW, Family
from in_process import LocalModel
from packaging.version import Version
from test_families import save_random
from transformers import AutoModelForCausalLM

from lilliput.engine.engine import Engine
from lilliput.engine.session import CacheSession, Step, StepOutput
from lilliput.engine.table import KEPT_BEFORE_WINDOW
from lilliput.errors import LilliputError, SessionExpired
from lilliput.models.sources import ModelFiles, resolve
from lilliput.models.span import Span
from lilliput.wire.prefix import GRAIN, prefix_keys

PAGE, LONGEST, ROWS, TOLERANCE = 16, 250, 3, 1e-4
#: five blocks with windows to one without
_FIVE_TO_ONE = ["sliding_attention"] * 5 + ["full_attention"]


def mixed() -> list[Family]:
    by_name = {family.name: family for family in FAMILIES}
    gemma3 = by_name["gemma3"]
    five = Family("gemma3, 5:1", gemma3.model_type, "", {**gemma3.config, "layer_types": _FIVE_TO_ONE}, since="5.12")
    gpt_oss = by_name["gpt_oss"]
    # two experts with the same score, but for rounding, would make two outputs that are both right
    all_experts = Family("gpt_oss, all experts", "gpt_oss", "", {**gpt_oss.config, "num_experts_per_tok": 4})
    return [five, all_experts, by_name["gemma2"], by_name["cohere2"]]


@dataclass
class Mixed:
    """A model in one piece, and all of its blocks in one engine."""

    files: ModelFiles
    whole: Any
    parts: LocalModel

    @property
    def engine(self) -> Any:
        return self.parts.engines[0]

    def open(self, rows: int = 1, prefix: list[list[bytes]] | None = None) -> CacheSession:
        return self.engine.open(0, BLOCKS, rows=rows, max_length=LONGEST, prefix=prefix, owner=b"us").result(30)

    def submit(self, session: CacheSession, ids: torch.Tensor, start: int, **options: Any) -> Future[Any]:
        """A step with the tokens of `ids` [rows, length] from `start` on."""
        keys = [prefix_keys(row.tolist(), salt=b"")[start // GRAIN :] for row in ids]
        done: Future[Any] = Future()
        hidden = self.parts.embed(ids)[:, start:]
        self.engine.submit(session, Step(hidden, hashes=keys, done=done.set_result, **options))
        return done

    @torch.no_grad()
    def expect(self, done: Future[Any], ids: torch.Tensor) -> None:
        """What a step gave are the logits of the last tokens of `ids`."""
        result = done.result(60)
        if isinstance(result, LilliputError):
            raise result
        assert isinstance(result, StepOutput)
        assert result.length == ids.shape[1]
        logits = self.parts.head(result.hidden)
        expected = self.whole(ids).logits[:, -logits.shape[1] :]
        assert (logits - expected).abs().max() < TOLERANCE * expected.abs().max()

    def through(self, engine: Engine, session: CacheSession, hidden: torch.Tensor) -> torch.Tensor:
        done: Future[Any] = Future()
        engine.submit(session, Step(hidden, done=done.set_result))
        return done.result(60).hidden

    def step(self, session: CacheSession, ids: torch.Tensor, start: int, **options: Any) -> None:
        self.expect(self.submit(session, ids, start, **options), ids)

    def used(self) -> int:
        return self.engine.call(lambda: self.engine.pool.used).result(30)

    def close(self, session: CacheSession) -> None:
        self.engine.close(session).result(30)


@pytest.fixture(scope="module", params=mixed(), ids=lambda family: family.name)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mixed]:
    if Version(transformers.__version__) < Version(request.param.since):
        pytest.skip(f"works since transformers {request.param.since}")
    folder = tmp_path_factory.mktemp("mixed")
    save_random(request.param, folder)
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    files = resolve(str(folder))
    parts = LocalModel(files, [(0, BLOCKS)])
    yield Mixed(files, whole, parts)
    parts.close()


@pytest.fixture(autouse=True)
def _nothing_left(model: Mixed) -> Iterator[None]:
    yield
    assert model.used() == 0
    model.engine.call(model.engine.pool.check).result(30)
    model.engine.call(model.engine.pool.forget_prefixes).result(30)


def text(chance: random.Random, *shape: int) -> torch.Tensor:
    return torch.tensor([chance.randrange(3, 128) for _ in range(shape[0] * shape[1])], dtype=torch.int64).view(*shape)


def test_a_long_session_holds_its_windows_and_all_of_the_rest(model: Mixed) -> None:
    groups = model.engine.span.groups
    narrow = [group for group in groups if group.window is not None]
    assert {group.window for group in groups} == {WINDOW, None}
    assert sum(len(group.blocks) for group in groups) == BLOCKS
    ids = text(random.Random(0), 2, LONGEST)
    session, at = model.open(rows=2), 0
    for tokens in (120, 1, 60, 1, 1, LONGEST - 183):
        at += tokens
        model.step(session, ids[:, :at], at - tokens)
        whole, left = -(-at // PAGE), max(0, at - WINDOW - KEPT_BEFORE_WINDOW) // PAGE
        assert model.used() == 2 * (whole * len(groups) - left * len(narrow))
    model.close(session)


def test_a_prefix_comes_back_with_the_windows_at_its_end(model: Mixed) -> None:
    chance = random.Random(1)
    ids = text(chance, 1, 200)
    keys = prefix_keys(ids[0].tolist(), salt=b"")
    first = model.open(prefix=[keys])
    assert first.length == 0
    model.step(first, ids, 0)
    model.close(first)
    second = model.open(prefix=[keys])
    assert second.length == 192
    model.step(second, ids, 192)
    longer = torch.cat([ids, text(chance, 1, 20)], dim=1)
    model.step(second, longer, 200)
    with pytest.raises(SessionExpired, match="send all tokens again"):
        model.step(second, ids[:, :60], 50, start_position=50)
    model.step(second, ids[:, :190], 185, start_position=185)
    model.close(second)


@torch.no_grad()
def test_parts_of_a_span_have_tables_for_their_own_blocks(model: Mixed) -> None:
    ids, at = text(random.Random(2), 1, 150), 0
    parts = [(0, 1), (1, 4), (4, BLOCKS)]
    sessions = [model.engine.open(*part, rows=1, max_length=150).result(30) for part in parts]
    embedded, expected = model.parts.embed(ids), model.whole(ids).logits
    for tokens in (130, 1, 19):
        hidden = embedded[:, at : at + tokens]
        for session in sessions:
            hidden = model.through(model.engine, session, hidden)
        error = (model.parts.head(hidden) - expected[:, at : at + tokens]).abs().max()
        assert error < TOLERANCE * expected.abs().max()
        at += tokens
    assert {block for session in sessions for table in session.tables for block in table.group.blocks} == {
        *range(BLOCKS)
    }
    for session in sessions:
        model.close(session)


@torch.no_grad()
def test_an_8_bit_cache_is_near(model: Mixed) -> None:
    span = Span.load(model.files, 0, BLOCKS, dtype=torch.float32, cache_dtype=torch.int8)
    engine = Engine(span, pages=16, page_size=PAGE)
    engine.start()
    ids = text(random.Random(3), 1, 150)
    session, embedded = engine.open(0, BLOCKS, rows=1, max_length=150).result(30), model.parts.embed(ids)
    hidden = torch.cat(
        [model.through(engine, session, embedded[:, a:b]) for a, b in ((0, 140), (140, 141), (141, 150))], 1
    )
    expected = model.whole(ids).logits
    assert (model.parts.head(hidden) - expected).norm() < 0.1 * expected.norm()
    engine.close(session).result(30)
    assert engine.pool.used == 0
    engine.stop()


def test_any_interleaving_of_sessions_equals_the_plain_model(model: Mixed) -> None:
    chance = random.Random(0)
    sessions: list[tuple[CacheSession, torch.Tensor]] = []
    texts: list[torch.Tensor] = []
    reused = expired = 0
    for _ in range(35):
        if len(sessions) < 2 or (len(sessions) < 4 and chance.random() < 0.2):
            known = chance.choice(texts)[:1] if texts and chance.random() < 0.7 else None
            prefix = None if known is None else [prefix_keys(known[0].tolist(), salt=b"")] * ROWS
            session = model.open(rows=ROWS, prefix=prefix)
            reused += session.length
            ids = (
                known[:, : session.length].repeat(ROWS, 1)
                if session.length
                else text(chance, chance.randint(1, ROWS), 0)
            )
            sessions.append((session, ids))
        work = []
        for place in chance.sample(range(len(sessions)), chance.randint(1, len(sessions))):
            session, ids = sessions[place]
            options: dict[str, Any] = {}
            if len(ids[0]) and chance.random() < 0.3:
                parents = [chance.randrange(len(ids)) for _ in range(chance.randint(1, ROWS))]
                ids, options["parents"] = ids[parents], parents
            if len(ids[0]) and chance.random() < 0.3:
                near = chance.choice([KEPT_BEFORE_WINDOW // 2, LONGEST])
                start = chance.randint(max(0, len(ids[0]) - near), len(ids[0]))
                ids, options["start_position"] = ids[:, :start], start
            start = ids.shape[1]
            more = min(chance.choice([1, 1, 5, 40, 90]), LONGEST - start)
            if more:
                ids = torch.cat([ids, text(chance, len(ids), more)], dim=1)
                work.append((place, ids, start, options))
        waiting = [model.submit(sessions[place][0], ids, start, **options) for place, ids, start, options in work]
        for (place, ids, start, _), done in zip(work, waiting, strict=True):
            if isinstance(done.result(60), SessionExpired):
                assert 0 < start < sessions[place][1].shape[1] - KEPT_BEFORE_WINDOW // 2
                expired += 1
                continue
            model.expect(done, ids)
            sessions[place] = sessions[place][0], ids
            texts = [*texts[-3:], ids]
        if chance.random() < 0.35:
            session, _ = sessions.pop(chance.randrange(len(sessions)))
            model.close(session)
    for session, _ in sessions:
        model.close(session)
    assert reused
    assert expired
