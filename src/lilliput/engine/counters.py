"""What an engine has done."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counters:
    """Totals since the engine started."""

    rounds: int = 0
    steps: int = 0
    tokens: int = 0
    #: tokens that a session found in kept pages and did not compute
    reused_tokens: int = 0
    largest_decode_batch: int = 0
    #: of training passes: a block there or back for some rows
    units: int = 0
    failures: int = 0
