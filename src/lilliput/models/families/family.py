"""What a family of models may need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


def _as_they_are(base: Any, blocks: Sequence[Any]) -> None:
    """Most blocks reach their attention through transformers' attention interface."""


@dataclass(frozen=True)
class Family:
    """How a family differs from most."""

    #: called with the base model and a span's blocks, to make them attend by `lilliput.models.call.attend`
    adapt: Callable[[Any, Sequence[Any]], None] = _as_they_are
    #: blocks return a tuple, hidden states first, and so must what stands for them
    tuples: bool = False
