"""Text from tokens as they come, in whole characters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

#: what a tokenizer makes of a character of which only some bytes are there
_INCOMPLETE = "\ufffd"
#: no character has so many bytes, and no token has less than one: what is incomplete for longer is no character
_LONGEST = 8


class Detokenizer:
    """Decodes a growing list of tokens without decoding it all again.

    :param keep_special: tokens such as the end of a turn are shown as they are written
    :param before: tokens that these continue; some tokenizers drop the space with which a text begins
    """

    def __init__(self, tokenizer: Any, *, keep_special: bool = False, before: Sequence[int] = ()) -> None:
        #: all that came
        self.tokens: list[int] = []
        self._ids = list(before)
        self._tokenizer, self._skip_special = tokenizer, not keep_special
        # tokens up to `_written` were handed out; decoding starts at `_anchor`: a token's text depends on what precedes
        self._anchor, self._written = 0, len(self._ids)

    def take(self, tokens: Sequence[int]) -> str:
        """Some more tokens came. The text that is now certain."""
        self.tokens += tokens
        self._ids += tokens
        text = self._decode(self._anchor)
        if text.endswith(_INCOMPLETE) and len(self._ids) - self._written < _LONGEST:
            return ""
        piece = text[len(self._decode(self._anchor, self._written)) :]
        self._anchor, self._written = self._written, len(self._ids)
        return piece

    def _decode(self, start: int, end: int | None = None) -> str:
        text: str = self._tokenizer.decode(
            self._ids[start:end], skip_special_tokens=self._skip_special, clean_up_tokenization_spaces=False
        )
        return text
