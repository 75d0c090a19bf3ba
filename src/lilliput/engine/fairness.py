"""What each peer has had of the engine, so that none waits for all that another one has brought."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from lilliput.engine.scheduler import Waiting, leading
from lilliput.engine.session import CacheSession, Step

#: when so many are remembered, those are forgotten that led none of the last as many rounds
_MOST_PEERS = 1024


class PeerTurns:
    """Belongs to the engine's thread.

    A peer that comes, or comes back, stands where those are that have had least: nothing is owed to it for the time in
    which it brought nothing.
    """

    def __init__(self) -> None:
        self._prefix_tokens: dict[str, int] = {}
        self._last_led: dict[str, int] = {}
        self._level = self._rounds = 0

    def prefix_tokens(self, peer: str) -> int:
        """Tokens of prefixes that the peer has had, in comparison with others."""
        return max(self._prefix_tokens.get(peer, 0), self._level)

    def last_led(self, peer: str) -> int:
        """The number of the last round that one of the peer's steps has led; 0: none lately."""
        return self._last_led.get(peer, 0)

    def waiting(self, session: CacheSession, step: Step) -> Waiting:
        """What the scheduler has to know of a step."""
        peer = session.peer
        return Waiting(
            session.start,
            session.end,
            step.rows,
            step.tokens - step.offset,
            session.bid,
            step.arrived,
            step.whole,
            peer,
            self.prefix_tokens(peer),
            self.last_led(peer),
        )

    def count(self, waiting: Sequence[Waiting], plan: Mapping[int, int]) -> None:
        """A round is computed, as `plan_round` has planned it."""
        self._rounds += 1
        self._last_led[waiting[leading(waiting)].peer] = self._rounds
        tokens = Counter[str]()
        for i, count in plan.items():
            if not waiting[i].is_decode:
                tokens[waiting[i].peer] += waiting[i].rows * count
        if tokens:
            self._level = min(map(self.prefix_tokens, tokens))
            for peer, count in tokens.items():
                self._prefix_tokens[peer] = self.prefix_tokens(peer) + count
        if len(self._last_led) + len(self._prefix_tokens) > 2 * _MOST_PEERS:
            self._forget()

    def _forget(self) -> None:
        self._last_led = {p: n for p, n in self._last_led.items() if n > self._rounds - _MOST_PEERS}
        self._prefix_tokens = {p: n for p, n in self._prefix_tokens.items() if p in self._last_led}
