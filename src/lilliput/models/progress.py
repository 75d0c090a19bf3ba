"""How long work reports how far it is."""

from __future__ import annotations

from collections.abc import Callable

#: Called with the name of a stage ("downloading SmolLM2-135M-Instruct"), the bytes done, and the bytes to do (`None`:
#: unknown). A stage without bytes ("waiting for another process") is reported once with `(stage, 0, None)`.
Progress = Callable[[str, int, int | None], None]


def silent(stage: str, done: int, total: int | None) -> None:
    """Tell nobody."""
