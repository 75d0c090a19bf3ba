"""How fast this engine is, as measured while it works."""

from __future__ import annotations

from dataclasses import dataclass

_WEIGHT = 0.1


@dataclass
class Rates:
    """Moving averages. Zero: not measured yet."""

    #: seconds of a round in which every row brings one token
    decode_round_seconds: float = 0.0
    #: rows in such a round
    decode_rows: float = 0.0
    prefill_tokens_per_second: float = 0.0

    def saw_decode(self, rows: int, seconds: float) -> None:
        self.decode_round_seconds = _blend(self.decode_round_seconds, seconds)
        self.decode_rows = _blend(self.decode_rows, rows)

    def saw_prefill(self, tokens: int, seconds: float) -> None:
        self.prefill_tokens_per_second = _blend(self.prefill_tokens_per_second, tokens / max(seconds, 1e-9))

    def begin(self, decode_round_seconds: float) -> None:
        """Begin with this for rounds in which every row brings one token."""
        self.decode_round_seconds = decode_round_seconds

    def forget(self) -> None:
        """Begin anew."""
        self.decode_round_seconds = self.decode_rows = self.prefill_tokens_per_second = 0.0

    @property
    def session_tokens_per_second(self) -> float:
        """What one more session may expect for each of its rows: a round for every token."""
        return 1 / self.decode_round_seconds if self.decode_round_seconds else 0.0


def _blend(old: float, new: float) -> float:
    return new if not old else (1 - _WEIGHT) * old + _WEIGHT * new
