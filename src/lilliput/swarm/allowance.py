"""A rate that may be exceeded for a while: so much a second on average, and a burst at once."""

from __future__ import annotations

import time
from collections.abc import Callable

#: so many peers are told apart; then those that have had nothing lately are forgotten
_MOST_PEERS = 1024


class Allowance:
    """What one peer may have.

    :param rate: a second
    :param burst: at once
    """

    def __init__(self, rate: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._burst, self._clock = rate, burst, clock
        self._paid = clock()  # when all that was taken would have come at the rate

    def take(self, amount: float) -> float:
        """So much was had. Returns how many seconds to wait before there is more."""
        self._paid = max(self._paid, self._clock()) + amount / self._rate
        return self.wait

    @property
    def wait(self) -> float:
        """Seconds until there is some again; 0: there is."""
        return max(0.0, self._paid - self._clock() - self._burst / self._rate)

    @property
    def untouched(self) -> bool:
        """Whether it is as if nothing had ever been taken."""
        return self._paid <= self._clock()


class Allowances:
    """The same for every peer."""

    def __init__(self, rate: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._options = rate, burst, clock
        self._of: dict[str, Allowance] = {}

    def of(self, peer: str) -> Allowance:
        found = self._of.get(peer)
        if found is None:
            if len(self._of) >= _MOST_PEERS:
                self._of = {name: allowance for name, allowance in self._of.items() if not allowance.untouched}
            found = self._of[peer] = Allowance(*self._options)
        return found
