"""Pages of attention cache: who uses them, which hold a known prefix, which are free. Bookkeeping only, no tensors.

A page is a reference count. Rows that share a prefix share its pages; a shared page is copied when one writes to it
(the caller does, see `Table`). A full page whose tokens' key is known stays findable after its last user left,
until someone needs the room. The idea of keyed pages is vLLM's automatic prefix caching.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class PagePool:
    """`count` pages of `page_size` token slots. Admission sees to it that `take` never finds the pool empty."""

    def __init__(self, count: int, page_size: int) -> None:
        self.count, self.page_size = count, page_size
        self._references = [0] * count
        self._free = list(range(count - 1, -1, -1))
        self._key_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}
        #: pages without users that hold a known prefix, least recently left first
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def used(self) -> int:
        """Pages that a session uses, each counted once however many rows share it."""
        return self.count - len(self._free) - len(self._idle)

    @property
    def kept(self) -> int:
        """Pages that nobody uses, kept for a prefix that may return."""
        return len(self._idle)

    @property
    def shared(self) -> int:
        """Pages that several rows use."""
        return sum(references > 1 for references in self._references)

    def take(self) -> int:
        """A page for one user, its contents undefined."""
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._idle.popitem(last=False)
            self._forget(page)
        self._references[page] = 1
        return page

    def share(self, page: int) -> None:
        """One more user of a page in use."""
        assert self._references[page] > 0
        self._references[page] += 1

    def leave(self, page: int) -> None:
        """One user less; the last one gives the page back."""
        self._references[page] -= 1
        assert self._references[page] >= 0
        if self._references[page] == 0:
            if page in self._key_of:
                self._idle[page] = None
            else:
                self._free.append(page)

    def is_shared(self, page: int) -> bool:
        return self._references[page] > 1

    def about_to_write(self, page: int) -> None:
        """Its only user changes the page: it no longer holds the prefix that it is known for."""
        self._forget(page)

    def know(self, page: int, key: bytes) -> None:
        """A page in use is full and holds the prefix `key`. The first page known for a key stays the one."""
        if page not in self._key_of and key not in self._page_of:
            self._key_of[page] = key
            self._page_of[key] = page

    def knows(self, key: bytes) -> bool:
        return key in self._page_of

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The longest run of known pages for a chain of keys, each with one user more."""
        pages: list[int] = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            if self._references[page] == 0:
                del self._idle[page]
            self._references[page] += 1
            pages.append(page)
        return pages

    def forget_prefixes(self) -> None:
        """Give up all kept pages."""
        for page in list(self._idle):
            del self._idle[page]
            self._forget(page)
            self._free.append(page)
        for page in list(self._key_of):
            self._forget(page)

    def check(self) -> None:
        """Audit: every page is exactly one of used, kept, free."""
        used = [page for page, references in enumerate(self._references) if references]
        assert sorted([*used, *self._free, *self._idle]) == list(range(self.count)), (
            "a page was lost or is listed twice"
        )
        assert all(self._page_of[key] == page for page, key in self._key_of.items())
        assert len(self._page_of) == len(self._key_of)

    def _forget(self, page: int) -> None:
        key = self._key_of.pop(page, None)
        if key is not None:
            del self._page_of[key]
