"""What stands for transformers' attention masks in a span.

A batch knows itself who attends to what: to everything up to itself, or within a window that its block names. So masks
are not built. But a family may mean something else by its mask, and would silently be computed wrongly: in a span's
trial run each mask is numbered, and what arrives at the attention is compared with what would be computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lilliput.errors import UnsupportedModel

#: transformers' form: whether, for (row, head, query's place, key's place), the query attends to the key
MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], Any]

#: what families write for "does not attend" is below
_HIDDEN = -1e4
_NEAR, _FAR = range(24), (500, 511, 512, 513, 1000, 2048, 4095, 4096, 4097, 8191, 8192, 8193, 20000)


def numbered(number: int) -> torch.Tensor:
    """A mask that is none, but can be told from others. (Some families compute with masks: None would not do.)"""
    return torch.full((1, 1, 1, 1), float(number))


def check(mask: Any, known: Sequence[MaskFunction | None], window: int | None, tokens: int) -> None:
    """Raise `UnsupportedModel` unless `mask`, as it came to a block's attention, means "up to itself, within `window`".

    :param known: what the masks mean, by number
    :param tokens: of a row in the trial
    """
    if not isinstance(mask, torch.Tensor) or not known:
        return  # the family gave no mask: causal
    if mask.dtype != torch.bool and bool(((mask < 0) & (mask > _HIDDEN)).any()):
        raise UnsupportedModel("its attention masks hold more than who attends to whom")
    if mask.numel() != 1:
        return  # a mask of the family's own making, for the few tokens of a trial
    if not 0 <= float(mask) < len(known):
        raise UnsupportedModel("its attention masks hold more than who attends to whom")
    function = known[int(mask)]
    if function is None:
        return
    edges = () if window is None else (window - 1, window, window + 1)
    try:
        same = _is_causal(function, sorted({*_NEAR, *_FAR, *edges}), window)
    except IndexError:  # releases before 5 also look up which of several packed texts a place belongs to
        same = _is_causal(function, range(tokens), window)
    if not same:
        raise UnsupportedModel("its attention masks are neither causal nor a sliding window")


def _is_causal(function: MaskFunction, places: Sequence[int], window: int | None) -> bool:
    """Whether a query attends to all places up to its own, within the window."""
    here = torch.tensor(list(places))
    query, key = here[:, None], here[None, :]
    row = torch.zeros(1, 1, dtype=torch.int64)
    expected = key <= query
    if window is not None:
        expected = expected & (key > query - window)
    return torch.equal(torch.as_tensor(function(row, row, query, key)).expand_as(expected), expected)
