"""Masks that mean something else than a batch computes are noticed when a span is loaded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import masking_utils

from lilliput.errors import UnsupportedModel
from lilliput.models.masks import check, numbered

CAUSAL: Any = masking_utils.causal_mask_function


def test_causal_and_sliding_masks_are_what_a_batch_computes() -> None:
    sliding = masking_utils.sliding_window_causal_mask_function(4096)
    check(numbered(0), [CAUSAL, sliding], None, 5)
    check(numbered(1), [CAUSAL, sliding], 4096, 5)
    check(None, [CAUSAL], None, 5)


@pytest.mark.parametrize(
    ("function", "window"),
    [
        (masking_utils.sliding_window_causal_mask_function(4096), None),
        (masking_utils.sliding_window_causal_mask_function(4096), 4095),
        (CAUSAL, 7),
        (masking_utils.chunked_causal_mask_function(8192, torch.zeros(1, dtype=torch.int64)), None),
        (masking_utils.or_masks(CAUSAL, lambda b, h, q, k: k < 4), None),
        (masking_utils.packed_sequence_mask_function(torch.zeros(1, 5)), None),
    ],
)
def test_others_are_refused(function: Any, window: int | None) -> None:
    with pytest.raises(UnsupportedModel):
        check(numbered(0), [function], window, 5)


def test_a_mask_with_biases_in_it_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="hold more"):
        check(numbered(0) - 0.5, [CAUSAL], None, 5)
    with pytest.raises(UnsupportedModel, match="hold more"):
        check(torch.tensor([[0.0, -1e9], [-0.5, 0.0]])[None, None], [CAUSAL], None, 5)
