"""An answer while it comes: its text in whole characters, and its pace."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from lilliput.client.detokenizer import Detokenizer


class Answer:
    """What `generate()` takes for a streamer: it hands on the text as it comes, in whole characters.

    :param write: takes each new piece of the text
    """

    def __init__(self, tokenizer: Any, write: Callable[[str], None]) -> None:
        #: all that was written
        self.text = ""
        self._detokenizer, self._write = Detokenizer(tokenizer), write
        self._prompt_came = False
        self._began = self._first_at = self._last_at = time.perf_counter()

    # -- what a streamer is asked for

    def put(self, value: Any) -> None:
        if not self._prompt_came:  # generate() hands in the prompt first
            self._prompt_came = True
            return
        self.take(value.flatten().tolist())

    def end(self) -> None:
        """Nothing is held back that will ever become a whole character."""

    # -- what it makes of them

    def take(self, tokens: Sequence[int]) -> None:
        """Some more tokens came."""
        self._last_at = time.perf_counter()
        if not self.tokens:
            self._first_at = self._last_at
        if piece := self._detokenizer.take(tokens):
            self.text += piece
            self._write(piece)

    @property
    def tokens(self) -> list[int]:
        """All that came."""
        return self._detokenizer.tokens

    # -- how fast it came

    @property
    def seconds_to_first(self) -> float:
        return self._first_at - self._began

    @property
    def tokens_per_second(self) -> float:
        """After the first token; if there is no second, with it."""
        if len(self.tokens) > 1 and self._last_at > self._first_at:
            return (len(self.tokens) - 1) / (self._last_at - self._first_at)
        return len(self.tokens) / max(self.seconds_to_first, 1e-9)

    @property
    def pace(self) -> str:
        if not self.tokens:
            return "no tokens"
        count = "1 token" if len(self.tokens) == 1 else f"{len(self.tokens)} tokens"
        return f"{count}, {self.tokens_per_second:.1f} tokens/s, the first after {self.seconds_to_first:.2f} s"
