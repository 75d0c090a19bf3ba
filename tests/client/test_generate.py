"""generate() over three servers says what one process says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache, StoppingCriteria, TextStreamer

from lilliput.errors import BadRequest, TooLong

GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def prompt(length: int, rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 256, (rows, length), generator=torch.Generator().manual_seed(seed))


def both(whole: Any, tiny: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    """Generate with both models, each from the same random state; they must agree."""
    torch.manual_seed(3)
    expected = whole.generate(ids, **{**GREEDY, **options})
    torch.manual_seed(3)
    answer = tiny.generate(ids, **{**GREEDY, **options})
    assert answer.tolist() == expected.tolist()
    return answer


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_beams": 4},
        {"num_beams": 4, "num_return_sequences": 3, "length_penalty": 0.5},
        {"num_beams": 3, "do_sample": True},
        {"do_sample": True, "top_k": 20, "temperature": 0.8},
        {"do_sample": True, "num_return_sequences": 3},
        {"prompt_lookup_num_tokens": 5},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
        {"use_cache": False},
        {"prefill_chunk_size": 16},
    ],
    ids=lambda options: "-".join(options) or "greedy",
)
def test_every_way_of_generating_is_hugging_face_s_own(whole: Any, tiny: Any, options: dict[str, Any]) -> None:
    both(whole, tiny, prompt(40), max_new_tokens=12, **options)


def test_an_assistant_model_drafts_and_the_swarm_verifies(whole: Any, tiny: Any) -> None:
    options = {"max_new_tokens": 20, **GREEDY}
    expected = whole.generate(prompt(30), **options)
    assert tiny.generate(prompt(30), assistant_model=whole, **options).tolist() == expected.tolist()


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"num_return_sequences": 2, "do_sample": True}])
def test_a_batch_of_unequal_prompts(whole: Any, tiny: Any, options: dict[str, Any]) -> None:
    ids = prompt(24, rows=3)
    mask = torch.ones_like(ids)
    for row, padding in enumerate((5, 0, 17)):
        ids[row, :padding], mask[row, :padding] = 0, 0
    both(whole, tiny, ids, attention_mask=mask, max_new_tokens=10, **options)


def test_streamers_and_stopping_criteria(whole: Any, tiny: Any) -> None:
    class After(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            return torch.full((len(input_ids),), input_ids.shape[1] >= 36)

    class Streamer(TextStreamer):
        def __init__(self) -> None:
            self.tokens: list[int] = []

        def put(self, value: torch.Tensor) -> None:
            self.tokens += value.flatten().tolist()

        def end(self) -> None:
            self.tokens.append(-1)

    streamer = Streamer()
    answer = tiny.generate(prompt(30), max_new_tokens=9999, stopping_criteria=[After()], streamer=streamer, **GREEDY)
    assert answer.shape == (1, 36)
    assert streamer.tokens == [*answer[0].tolist(), -1]


def test_logits_equal_the_whole_model_s(whole: Any, tiny: Any) -> None:
    ids = prompt(33, rows=2)
    with torch.no_grad():
        expected, logits = whole(ids).logits, tiny(ids).logits
        assert (logits - expected).abs().max() < 1e-4 * expected.abs().max()
        mask = torch.ones_like(ids)
        mask[0, :9] = 0
        expected, logits = whole(ids, attention_mask=mask).logits, tiny(ids, attention_mask=mask).logits
        assert (logits - expected)[mask.bool()].abs().max() < 1e-4 * expected.abs().max()
    steps = tiny.generate(ids, max_new_tokens=4, output_logits=True, return_dict_in_generate=True, **GREEDY)
    again = whole.generate(ids, max_new_tokens=4, output_logits=True, return_dict_in_generate=True, **GREEDY)
    for mine, theirs in zip(steps.logits, again.logits, strict=True):
        assert (mine - theirs).abs().max() < 1e-4 * theirs.abs().max()


def test_a_returning_prompt_is_not_computed_again(whole: Any, tiny: Any) -> None:
    ids = prompt(100, seed=11)

    def computed(ids: torch.Tensor) -> int:
        with tiny.inference_session(max_length=128) as session:
            both(whole, tiny, ids, max_new_tokens=1)
            return session.stats[0].computed_tokens  # type: ignore[no-any-return]

    first, again, other = computed(ids), computed(ids), computed(prompt(100, seed=12))
    assert first == other == 100
    assert again <= 100 - 64  # whole pages come back
    # beams begin with the same prompt: it is computed once, and found again
    both(whole, tiny, ids, max_new_tokens=5, num_beams=3)


def test_beams_share_the_computation_of_their_prompt(tiny: Any) -> None:
    with tiny.inference_session(max_length=100, rows=4) as session:
        tiny.generate(prompt(50, seed=21), max_new_tokens=1, num_beams=4, **GREEDY)
        assert session.stats[0].computed_tokens == 50


class TestInsideASession:
    """The caches stay between calls."""

    @pytest.fixture
    def session(self, tiny: Any) -> Iterator[Any]:
        with tiny.inference_session(max_length=300) as session:
            yield session

    def steps(self, session: Any) -> int:
        return session.stats[0].computed_tokens if session.hops else 0  # type: ignore[no-any-return]

    def test_the_next_turn_computes_only_what_is_new(self, whole: Any, tiny: Any, session: Any) -> None:
        answer = both(whole, tiny, prompt(40, seed=31), max_new_tokens=10)
        assert session.position == 49
        before = self.steps(session)
        conversation = torch.cat([answer, prompt(7, seed=32)], dim=1)
        both(whole, tiny, conversation, max_new_tokens=10)
        assert self.steps(session) - before == 1 + 7 + 9
        assert session.tokens.shape == (1, session.position)

    def test_it_goes_back_five_tokens_and_on(self, whole: Any, tiny: Any, session: Any) -> None:
        answer = both(whole, tiny, prompt(40, seed=33), max_new_tokens=15)
        session.position -= 5
        before = self.steps(session)
        both(whole, tiny, torch.cat([answer[:, : session.position], prompt(6, seed=34)], 1), max_new_tokens=8)
        assert self.steps(session) - before == 6 + 7

    def test_a_changed_conversation_goes_back_to_where_it_differs(self, whole: Any, tiny: Any, session: Any) -> None:
        ids = prompt(40, seed=35)
        both(whole, tiny, ids, max_new_tokens=5)
        ids[0, 30] = (ids[0, 30] + 1) % 200 + 3
        before = self.steps(session)
        both(whole, tiny, ids, max_new_tokens=1)
        assert self.steps(session) - before == 10
        both(whole, tiny, prompt(12, seed=36), max_new_tokens=5)
        assert session.position == 16

    def test_the_same_question_again_computes_one_token(self, whole: Any, tiny: Any, session: Any) -> None:
        both(whole, tiny, prompt(40, seed=37), max_new_tokens=5)
        before = self.steps(session)
        both(whole, tiny, prompt(40, seed=37), max_new_tokens=1)
        assert self.steps(session) - before == 1

    @pytest.mark.skipif(int(transformers.__version__.split(".")[0]) < 5, reason="Hugging Face's own, since release 5")
    def test_new_tokens_alone_with_a_mask_for_all(self, whole: Any, tiny: Any, session: Any) -> None:
        answer = both(whole, tiny, prompt(40, seed=38), max_new_tokens=10)
        new = torch.cat([answer[:, session.position :], prompt(5, seed=39)], dim=1)
        seen = session.tokens
        mask = torch.ones(1, session.position + new.shape[1], dtype=torch.int64)
        mine = tiny.generate(new, attention_mask=mask, max_new_tokens=6, **GREEDY)
        expected = whole.generate(torch.cat([seen, new], dim=1), max_new_tokens=6, **GREEDY)
        assert mine[:, -6:].tolist() == expected[:, -6:].tolist()

    def test_beams_and_single_rows_take_turns(self, whole: Any, tiny: Any, session: Any) -> None:
        answer = both(whole, tiny, prompt(30, seed=40), max_new_tokens=6, num_beams=3)
        assert session.rows == 3
        answer = both(whole, tiny, torch.cat([answer, prompt(4, seed=41)], 1), max_new_tokens=6)
        both(whole, tiny, torch.cat([answer, prompt(4, seed=42)], 1), max_new_tokens=6, num_beams=4)
        both(whole, tiny, prompt(20, rows=2, seed=43), max_new_tokens=6)

    def test_padded_batches_are_continued(self, whole: Any, tiny: Any, session: Any) -> None:
        ids = prompt(20, rows=2, seed=44)
        mask = torch.ones_like(ids)
        ids[1, :6], mask[1, :6] = 0, 0
        answer = both(whole, tiny, ids, attention_mask=mask, max_new_tokens=6)
        before = self.steps(session)
        more = torch.cat([answer, prompt(3, rows=2, seed=45)], dim=1)
        longer = torch.cat([mask, torch.ones(2, more.shape[1] - 20, dtype=mask.dtype)], dim=1)
        both(whole, tiny, more, attention_mask=longer, max_new_tokens=4)
        assert self.steps(session) - before == 2 * (1 + 3 + 3)

    def test_assisted_generation_rolls_back(self, whole: Any, tiny: Any, session: Any) -> None:
        both(whole, tiny, prompt(40, seed=46), max_new_tokens=16, prompt_lookup_num_tokens=6, eos_token_id=2)
        both(whole, tiny, prompt(40, seed=46), max_new_tokens=16)

    def test_past_its_length_is_an_error_and_the_session_stays_usable(self, tiny: Any, whole: Any) -> None:
        with tiny.inference_session(max_length=20) as session:
            with pytest.raises(TooLong, match="20"):
                tiny.generate(prompt(15, seed=47), max_new_tokens=10, **GREEDY)
            assert session.position == 20
            session.max_length = 40
            both(whole, tiny, prompt(15, seed=47), max_new_tokens=10)


def test_a_session_may_be_named_instead_of_entered(whole: Any, tiny: Any) -> None:
    with tiny.inference_session(max_length=64) as outer:
        inner = tiny.inference_session(max_length=64)
        options = {"max_new_tokens": 3, **GREEDY}
        expected = whole.generate(prompt(9), **options)
        assert tiny.generate(prompt(9), session=inner, **options).tolist() == expected.tolist()
        assert (outer.position, inner.position) == (0, 11)
        inner.close()


def test_another_kind_of_cache_is_refused(tiny: Any) -> None:
    with pytest.raises(BadRequest, match="DynamicCache"):
        tiny(prompt(5), past_key_values=DynamicCache())


def test_a_plain_call_returns_no_cache_that_would_be_empty(tiny: Any) -> None:
    with torch.no_grad():
        output = tiny(prompt(5))
    assert output.get("past_key_values") is None
    assert output.get("cache") is None
