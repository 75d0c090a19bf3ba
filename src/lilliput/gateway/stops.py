"""Ends a text where a stop string begins, also one that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class Stops:
    """Hands text on, except for what may be the beginning of a stop string.

    Attributes:
        found: a stop string has come; it and what follows is dropped
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = list(strings)
        self._held = ""
        self._longest = max(map(len, strings), default=0)
        self.found = False

    def take(self, text: str) -> str:
        """Some more text came. The text that can be shown now."""
        if not self._strings:
            return text
        if self.found:
            return ""
        text = self._held + text
        places = [place for string in self._strings if (place := text.find(string)) >= 0]
        if places:
            self.found, self._held = True, ""
            return text[: min(places)]
        certain = self._certain(text)
        self._held = text[certain:]
        return text[:certain]

    def rest(self) -> str:
        """What was held back, when nothing more comes."""
        held, self._held = self._held, ""
        return held

    def _certain(self, text: str) -> int:
        """How much of `text` can be in no stop string."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if any(string.startswith(text[start:]) for string in self._strings):
                return start
        return len(text)
