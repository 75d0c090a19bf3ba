"""Every family's model in three spans computes what transformers' own model computes in one piece."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from families import BLOCKS, FAMILIES, Family
from in_process import LocalModel, LocalSession, together
from packaging.version import Version
from transformers import AutoConfig, AutoModelForCausalLM

from lilliput.models.sources import resolve

SPANS = [(0, 2), (2, 4), (4, BLOCKS)]
#: relative to the largest logit
TOLERANCE = 1e-4
LENGTH = 40


@dataclass
class Pair:
    """A model in one piece, and the same in three spans."""

    whole: Any
    parts: LocalModel

    @torch.no_grad()
    def expect(self, got: torch.Tensor, ids: torch.Tensor) -> None:
        """`got` [rows, tokens, hidden], out of the last block, gives the logits of the last tokens of `ids`."""
        expected = self.whole(ids).logits[:, -got.shape[1] :]
        logits = self.parts.head(got)
        assert expected.std() > 0.01
        assert (logits - expected).abs().max() < TOLERANCE * expected.abs().max()


def save_random(family: Family, folder: Path) -> None:
    """A model of this family with random weights that are large enough for errors to show."""
    config = AutoConfig.for_model(
        family.model_type, **family.config, initializer_range=0.15, bos_token_id=1, eos_token_id=2, pad_token_id=0
    )
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in [*model.parameters(), *(b for n, b in model.named_buffers() if n in model.state_dict())]:
            if parameter.dim() == 1:  # norms, biases, sinks: all alike as they are made
                parameter += torch.randn_like(parameter) * 0.1
        model.save_pretrained(folder)


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda family: family.name)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    if Version(transformers.__version__) < Version(request.param.since):
        pytest.skip(f"works since transformers {request.param.since}")
    folder = tmp_path_factory.mktemp("family")
    save_random(request.param, folder)
    whole = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=request.param.reference
    ).eval()
    parts = LocalModel(resolve(str(folder)), SPANS)
    yield Pair(whole, parts)
    parts.close()


def random_ids(rows: int, length: int = LENGTH, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 128, (rows, length), generator=torch.Generator().manual_seed(seed))


def test_whole_rows_without_a_cache(pair: Pair) -> None:
    ids = random_ids(2)
    with torch.no_grad():
        expected = pair.whole(ids).logits
        got = pair.parts.ends(ids).logits
    assert (got - expected).abs().max() < TOLERANCE * expected.abs().max()


def test_a_prefix_in_one_go_then_step_by_step(pair: Pair) -> None:
    ids = random_ids(1)
    hidden = pair.parts.embed(ids)
    session = LocalSession(pair.parts.engines)
    outputs = together([(session, hidden[:, :25])])
    outputs += [together([(session, hidden[:, i : i + 1])])[0] for i in range(25, LENGTH)]
    pair.expect(torch.cat(outputs, dim=1), ids)
    session.close()


def test_packed_with_sessions_of_other_lengths(pair: Pair) -> None:
    lengths = [3, 20, 31]
    ids = [random_ids(1, length + 4, seed=length) for length in lengths]
    hidden = [pair.parts.embed(row) for row in ids]
    sessions = [LocalSession(pair.parts.engines) for _ in ids]
    outputs = together([(s, h[:, :-4]) for s, h in zip(sessions, hidden, strict=True)])
    for back in (4, 3, 2, 1):
        last = slice(-back, 1 - back or None)
        step = together([(s, h[:, last]) for s, h in zip(sessions, hidden, strict=True)])
        outputs = [torch.cat(both, dim=1) for both in zip(outputs, step, strict=True)]
    for got, row, session in zip(outputs, ids, sessions, strict=True):
        pair.expect(got, row)
        session.close()


def test_rolled_back_and_on(pair: Pair) -> None:
    ids, other = random_ids(2), random_ids(2, 12, seed=1)
    changed = torch.cat([ids[:, :22], other], dim=1)
    session = LocalSession(pair.parts.engines, rows=2)
    together([(session, pair.parts.embed(ids))])
    session.position = 22
    hidden = pair.parts.embed(changed)
    outputs = [together([(session, hidden[:, part])])[0] for part in (slice(22, 27), slice(27, 28), slice(28, 34))]
    pair.expect(torch.cat(outputs, dim=1), changed)
    session.close()


def test_rows_that_continue_others(pair: Pair) -> None:
    ids = random_ids(3, 20)
    session = LocalSession(pair.parts.engines, rows=4)
    together([(session, pair.parts.embed(ids))])
    for step, parents in enumerate([[2, 0, 2, 1], [3, 3, 0, 1]]):
        ids = torch.cat([ids[parents], random_ids(4, 1, seed=step)], dim=1)
        session.reorder(parents)
        (output,) = together([(session, pair.parts.embed(ids)[:, -1:])])
        pair.expect(output, ids)
    session.close()


@pytest.mark.parametrize("how", ["greedy", "beams", "padded"])
def test_generate_is_hugging_face_s_own(pair: Pair, how: str) -> None:
    ids = random_ids(2, 17, seed=5)
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "use_cache": True}
    options |= {"eos_token_id": None, "pad_token_id": 0}
    options["attention_mask"] = torch.ones_like(ids)
    if how == "beams":
        options["num_beams"] = 3
    if how == "padded":
        ids[0, :6] = options["attention_mask"][0, :6] = 0
    expected = pair.whole.generate(ids, **options)
    assert pair.parts.generate(ids, 2 * options.get("num_beams", 1), **options).tolist() == expected.tolist()
