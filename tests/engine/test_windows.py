"""Where all blocks look at a window only, a session holds its window's pages, and computes the same."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM, MistralModel

from lilliput.engine.engine import Engine
from lilliput.engine.pages import PagePool
from lilliput.engine.session import CacheSession, Step, StepOutput
from lilliput.engine.table import KEPT_BEFORE_WINDOW
from lilliput.errors import SessionExpired
from lilliput.models.paged_cache import Group
from lilliput.models.sources import resolve
from lilliput.models.span import Span

PAGE, WINDOW, LENGTH = 16, 20, 300
#: what a row may hold between two steps
MOST = -(-(WINDOW + KEPT_BEFORE_WINDOW) // PAGE) + 1
KEYS = [bytes([number]) * 16 for number in range(LENGTH // 16)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = MistralConfig(
        num_hidden_layers=2, vocab_size=64, sliding_window=WINDOW, max_position_embeddings=1024, **sizes
    )
    config.initializer_range = 0.2
    folder = tmp_path_factory.mktemp("models") / "tiny-mistral"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        MistralForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    engine = Engine(Span.load(resolve(str(folder)), 0, 2, dtype=torch.float32), pages=48, page_size=PAGE)
    engine.start()
    yield engine
    engine.stop()


@pytest.fixture(scope="module")
def hidden() -> torch.Tensor:
    return torch.randn(2, LENGTH, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def expected(folder: Path, hidden: torch.Tensor) -> torch.Tensor:
    whole: Any = MistralModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    whole.norm = torch.nn.Identity()
    with torch.no_grad():
        return whole(inputs_embeds=hidden, use_cache=False).last_hidden_state


def step(engine: Engine, session: CacheSession, hidden: torch.Tensor, **fields: Any) -> torch.Tensor:
    done: Future[Any] = Future()
    engine.submit(session, Step(hidden, done=done.set_result, **fields))
    result = done.result(30)
    if isinstance(result, Exception):
        raise result
    assert isinstance(result, StepOutput)
    return result.hidden


def close(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((got - expected).abs().max() < 1e-4 * expected.abs().max())


def test_pages_behind_the_window_are_given_back(engine: Engine, hidden: torch.Tensor, expected: torch.Tensor) -> None:
    session = engine.open(0, 2, rows=2, max_length=LENGTH).result()
    at = 0
    for tokens in (90, 1, 1, 70, *[1] * (LENGTH - 162)):
        output = step(engine, session, hidden[:, at : at + tokens])
        assert close(output, expected[:, at : at + tokens])
        at += tokens
        assert engine.pool.used <= 2 * MOST
    assert session.tables[0].left == (LENGTH - WINDOW - KEPT_BEFORE_WINDOW) // PAGE
    engine.close(session).result()
    assert engine.pool.used == 0
    engine.pool.check()


def test_rollback_within_what_is_kept_and_beyond(engine: Engine, hidden: torch.Tensor, expected: torch.Tensor) -> None:
    session = engine.open(0, 2, rows=2, max_length=LENGTH).result()
    step(engine, session, hidden[:, :250])
    back = 250 - KEPT_BEFORE_WINDOW + 1
    assert close(step(engine, session, hidden[:, back:260], start_position=back), expected[:, back:260])
    with pytest.raises(SessionExpired, match="send all tokens again"):
        step(engine, session, hidden[:, 100:110], start_position=100)
    assert close(step(engine, session, hidden[:, 260:270]), expected[:, 260:270])  # nothing has changed
    assert close(step(engine, session, hidden[:, :270], start_position=0), expected[:, :270])
    output = step(engine, session, hidden[[1, 1]][:, 270:271], parents=[1, 1])
    assert close(output, expected[[1, 1]][:, 270:271])
    engine.close(session).result()
    assert engine.pool.used == 0
    engine.pool.check()


def test_a_prefix_comes_back_as_its_window(engine: Engine, hidden: torch.Tensor, expected: torch.Tensor) -> None:
    for found in (0, 288):
        session = engine.open(0, 2, rows=1, max_length=400, prefix=[KEYS]).result()
        assert session.length == found
        assert engine.pool.used <= MOST
        output = step(engine, session, hidden[:1, found:], hashes=[KEYS[found // 16 :]])
        assert close(output, expected[:1, found:])
        engine.close(session).result()
    engine.pool.check()


def test_without_a_window_nothing_is_given_back() -> None:
    pool = PagePool(40, PAGE)
    session = CacheSession(pool, 0, 2, [Group((0, 1))], rows=1, max_length=500)
    session.begin(one := Step(torch.zeros(1, 500, 8)), 8, torch.float32)
    session.length = one.offset = 500
    session.finish(one)
    assert pool.used == -(-500 // PAGE)
