"""A session's page table for one group of a span's blocks: in which pages the tokens of its rows lie."""

from __future__ import annotations

from collections.abc import Sequence

from lilliput.engine.pages import PagePool
from lilliput.models.paged_cache import Group

#: where only a window of tokens is looked at, so many before it are kept, too, in case that some are rolled back
KEPT_BEFORE_WINDOW = 64


def kept_tokens(groups: Sequence[Group], step: int) -> list[int | None]:
    """Tokens of a row that each group's table holds at most, with steps of at most `step` tokens; None: all."""
    return [None if group.window is None else group.window + KEPT_BEFORE_WINDOW + step for group in groups]


class Table:
    """Pages of every row, all of which have the same length.

    :param scope: of the keys by which its pages are found again: what they hold was computed for it
    :ivar rows: each row's pages, but for the first `left` ones
    :ivar left: pages at the beginning of every row that were given back, since nobody looks at them
    """

    def __init__(self, pool: PagePool, group: Group, scope: bytes) -> None:
        self._pool, self.group, self._scope = pool, group, scope
        self.rows: list[list[int]] = []
        self.left = 0

    def first_seen(self, length: int) -> int:
        """The first page that token number `length` looks at."""
        window = self.group.window
        return 0 if window is None else max(0, length + 1 - window) // self._pool.page_size

    def reaches(self, length: int) -> bool:
        """Whether a row can be rolled back to `length`."""
        return length == 0 or self.first_seen(length) >= self.left

    def begin(self, rows: int) -> None:
        """Empty rows."""
        self.rows = [[] for _ in range(rows)]

    # ---- pages that are known ----

    def known(self, keys: Sequence[bytes], most: int) -> int:
        """With how many leading pages of a row, `most` at most, a session can go on from here.

        :param keys: of its pages
        """
        known = [self._pool.knows(self._scope + key) for key in keys[:most]]
        if self.group.window is None:
            return known.index(False) if False in known else most
        while most and not all(known[self._first_to_adopt(most) : most]):
            most -= 1
        return most

    def adopt(self, keys: Sequence[Sequence[bytes]]) -> None:
        """Begin with known pages; `known` has told how many.

        :param keys: of each row's pages
        """
        count = len(keys[0])
        self.left = self._behind(count * self._pool.page_size)
        for number in range(self.left, self._first_to_adopt(count)):
            if not all(self._pool.knows(self._scope + row[number]) for row in keys):
                self.left = number + 1
        self.rows = [self._pool.find([self._scope + key for key in row[self.left :]]) for row in keys]

    def publish(self, row: int, first: int, keys: Sequence[bytes]) -> None:
        """From the row's page number `first` on, pages are full, and these are their keys."""
        for number, key in enumerate(keys, first):
            if number >= self.left:
                self._pool.know(self.rows[row][number - self.left], self._scope + key)

    # ---- changes ----

    def reorder(self, parents: Sequence[int]) -> None:
        rows = [list(self.rows[parent]) for parent in parents]
        for row in rows:
            for page in row:
                self._pool.share(page)
        self._leave_all()
        self.rows = rows

    def roll_back(self, length: int) -> None:
        """Keep `length` tokens: as many as `reaches` allows."""
        keep = max(0, -(-length // self._pool.page_size) - self.left)
        for row in self.rows:
            self._leave(row[keep:])
            del row[keep:]
        if not length:
            self.left = 0

    def grow(self, start: int, length: int) -> tuple[list[tuple[int, int]], list[int]]:
        """Pages for every row up to `length`, none of those from token `start` on shared with anyone.

        Returns which pages are to be copied, and to where, and which are new.
        """
        size, pool = self._pool.page_size, self._pool
        first, count = start // size - self.left, -(-length // size) - self.left
        copies: list[tuple[int, int]] = []
        fresh: list[int] = []
        for row in self.rows:
            if len(row) > first:  # the next token goes into the middle of this page
                page = row[first]
                if pool.is_shared(page):
                    row[first] = pool.take()
                    copies.append((page, row[first]))
                    pool.leave(page)
                else:
                    pool.about_to_write(page)
            more = [pool.take() for _ in range(count - len(row))]
            row += more
            fresh += more
        return copies, fresh

    def leave_behind(self, length: int) -> None:
        """Rows have `length` tokens now: give back the pages that nobody will look at."""
        left = self._behind(length)
        if left > self.left:
            for row in self.rows:
                self._leave(row[: left - self.left])
                del row[: left - self.left]
            self.left = left

    def close(self) -> None:
        """Give all pages back."""
        self._leave_all()
        self.rows, self.left = [], 0

    def _behind(self, length: int) -> int:
        """Pages of a row of `length` tokens that need not be kept."""
        window = self.group.window
        return 0 if window is None else max(0, length - window - KEPT_BEFORE_WINDOW) // self._pool.page_size

    def _first_to_adopt(self, count: int) -> int:
        """Of `count` known pages, the first that is needed. (Their last token may have to be computed once more.)"""
        return self.first_seen(count * self._pool.page_size - 1)

    def _leave_all(self) -> None:
        for row in self.rows:
            self._leave(row)

    def _leave(self, pages: Sequence[int]) -> None:
        for page in reversed(pages):  # kept ones make room in this order, and are of no use without earlier ones
            self._pool.leave(page)
