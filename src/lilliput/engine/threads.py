"""How many of the processor's threads a round uses.

More threads make a round of many tokens faster. A round of one token is a row of short operations, and at each of them
the threads must find each other: on a small or busy machine one thread alone is as fast, and leaves the other cores to
whoever else computes. Which it is, is measured when the server starts.
"""

from __future__ import annotations

import torch

#: more threads must make a round faster by this factor to be worth their cores
_WORTH = 1.25


class Threads:
    """The number of torch's threads, by the tokens of a round. Belongs to the engine's thread.

    :ivar most: threads for rounds that were not measured, and for large ones
    """

    def __init__(self) -> None:
        self.most = self._now = torch.get_num_threads()
        self._best: dict[int, int] = {}
        self._fixed: int | None = None

    def candidates(self) -> list[int]:
        """Numbers of threads to try: all, half of them, and so on down to one."""
        counts = [self.most]
        while counts[-1] > 1:
            counts.append(counts[-1] // 2)
        return counts

    def learn(self, tokens: int, seconds: dict[int, float]) -> None:
        """Of rounds of so many tokens it was measured how long they take, by number of threads."""
        self._fixed = None
        fastest = min(seconds.values())
        self._best[tokens] = min(count for count, took in seconds.items() if took <= _WORTH * fastest)

    def fix(self, count: int) -> None:
        """Use so many whatever the round, until something is learnt."""
        self._fixed = count

    @property
    def measuring(self) -> bool:
        return self._fixed is not None

    def use_for(self, tokens: int) -> int:
        """Set torch's threads for a round of so many tokens: as in the smallest measured round that is as large."""
        count = self._fixed
        if count is None:
            count = next((self._best[size] for size in sorted(self._best) if tokens <= size), self.most)
        if count != self._now:
            torch.set_num_threads(count)
            self._now = count
        return count
