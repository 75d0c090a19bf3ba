"""What an answer is handed on in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lilliput.client.recovery import Recovery
from lilliput.gateway.likelihood import Likelihood


@dataclass(frozen=True)
class Token:
    """A token of an answer; where its text begins in the answer's text, in characters.

    :ivar likelihood: None for the first of a prompt, which follows nothing
    """

    id: int
    likelihood: Likelihood | None
    offset: int


@dataclass
class Piece:
    """Some more of an answer. The last one says why it ended: stop, length.

    :ivar recoveries: from whom others took over before it came
    """

    text: str
    tokens: list[Token] = field(default_factory=list)
    finish: str | None = None
    recoveries: Sequence[Recovery] = ()
