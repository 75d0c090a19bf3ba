"""Masks and positions on their way from Hugging Face's model to the session."""

from __future__ import annotations

import pytest
import torch

from lilliput.client.gate import _follows, _mask_of, _position_ids_of, _repeats
from lilliput.client.history import PADDING
from lilliput.errors import BadRequest


def test_a_mask_without_padding_is_none() -> None:
    assert _mask_of(torch.ones(2, 5), 2, 3, None) == (None, None)
    assert _mask_of(None, 0, 3, None) == (None, None)


def test_padding_is_hidden_from_all_but_itself() -> None:
    mask, visible = _mask_of(torch.tensor([[0, 1, 1], [1, 1, 1]]), 0, 3, None)
    assert mask is not None
    assert visible is not None
    assert mask.int().tolist() == [
        [[1, 0, 0], [0, 1, 0], [0, 1, 1]],
        [[1, 0, 0], [1, 1, 0], [1, 1, 1]],
    ]
    later, _ = _mask_of(torch.tensor([[0, 1, 1], [1, 1, 1]]), 2, 1, None)
    assert later is not None
    assert later.int().tolist() == [[[0, 1, 1]], [[1, 1, 1]]]


def test_a_mask_of_the_new_tokens_only_is_completed_from_what_was_seen() -> None:
    seen = torch.tensor([[PADDING, 4], [4, 4]])
    whole, _ = _mask_of(torch.tensor([[0, 1, 1], [1, 1, 1]]), 2, 1, seen)
    part, _ = _mask_of(torch.tensor([[1], [1]]), 2, 1, seen)
    assert whole is not None
    assert part is not None
    assert torch.equal(whole, part)
    with pytest.raises(BadRequest, match="mask of 2 tokens"):
        _mask_of(torch.ones(1, 2), 5, 1, None)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_mask_of_four_dimensions_goes_through(kind: str) -> None:
    pattern = torch.tensor([[1, 0, 0], [1, 1, 0], [0, 1, 1]]).bool()
    given = pattern[None, None]
    if kind == "float":
        given = torch.where(given, 0.0, torch.finfo(torch.float32).min)
    mask, visible = _mask_of(given, 0, 3, None)
    assert mask is not None
    assert mask.tolist() == [pattern.tolist()]
    assert visible is None


def test_positions_that_are_the_places_in_the_cache_are_not_sent() -> None:
    assert _position_ids_of(None, 4, 2, 3) is None
    assert _position_ids_of(torch.tensor([[4, 5, 6]]), 4, 2, 3) is None
    sent = _position_ids_of(torch.tensor([[0, 1, 2]]), 4, 2, 3)
    assert sent is not None
    assert sent.tolist() == [[0, 1, 2], [0, 1, 2]]


def test_positions_made_of_the_padding_are_recognised() -> None:
    padding = torch.tensor([[False, False, True, True, True]])
    assert _follows(torch.tensor([[0, 0, 0, 1, 2]]), padding, 0)
    assert _follows(torch.tensor([[1, 1, 0, 1, 2]]), padding, 0)
    assert _follows(torch.tensor([[2]]), padding, 4)
    assert not _follows(torch.tensor([[0, 1, 2, 3, 4]]), padding, 0)


def test_rows_that_begin_alike_are_found() -> None:
    tokens = torch.tensor([[1, 2], [1, 2], [3, 4], [3, 4], [1, 2]])
    assert _repeats(tokens) == ([0, 2, 4], [0, 0, 1, 1, 2])
    assert _repeats(tokens[1:3]) is None
