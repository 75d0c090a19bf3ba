"""What is told about servers that others took the places of."""

from __future__ import annotations

from dataclasses import dataclass

from lilliput.errors import LilliputError, MissingBlocks, Unreachable


@dataclass(frozen=True)
class Recovery:
    """Blocks that went from one server to others.

    :ivar why: what the server that had them did, in words, or what is better elsewhere
    :ivar seconds: that a step waited for it
    :ivar replayed_tokens: per row, computed anew
    :ivar waited_tokens: of those, so many while a step waited
    :ivar moved: nothing had failed: others were ready before the server left, or before they took over as the faster
    """

    start: int
    end: int
    peer_id: str
    new_peer_ids: tuple[str, ...]
    why: str
    seconds: float
    replayed_tokens: int
    waited_tokens: int
    moved: bool = False

    def __str__(self) -> str:
        new = " and ".join(peer[-8:] for peer in self.new_peer_ids)
        return f"blocks {self.start}:{self.end} went from {self.peer_id[-8:]} to {new} in {self.seconds:.2f} s"


def why_nobody(error: LilliputError, refusal: LilliputError | None, first: LilliputError) -> LilliputError:
    """What to say when nobody takes over: who refused, or else which blocks nobody has and what became of them."""
    if not isinstance(error, MissingBlocks):
        return error
    if refusal is not None and not isinstance(refusal, Unreachable):
        return refusal
    return type(error)(f"{error} ({first})", error.blocks)
