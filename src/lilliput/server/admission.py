"""Who may start a session now, and who waits in which place. Bookkeeping of promises; no sockets, no tensors.

A session is promised cache for its whole `max_length`; the sum of promises never exceeds the pool, so a session that
was let in can always grow to its end. (Pages themselves are taken as they fill.) A higher bid stands earlier in the
queue; among equal bids, first come first served. Nobody is overtaken by a smaller request behind: a large one would
wait for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from lilliput.errors import Busy, CacheFull, TooLong


class Ticket:
    """A session's place: granted, or in the queue.

    :ivar granted: the promise holds
    :ivar queue_length: how many sessions must finish first; 0 if granted
    :ivar changed: called when either changes
    """

    def __init__(self, pages: int, bid: float, peer: str, changed: Callable[[], None]) -> None:
        self.pages, self.bid, self.peer, self.changed = pages, bid, peer, changed
        self.granted = False
        self.queue_length = 0


class Admission:
    """Promises of a pool of `pages` pages.

    :param max_length: tokens per row that a session may ask for
    :param max_queue: sessions that may wait
    :param max_sessions_per_peer: running and waiting sessions that one peer may have
    """

    def __init__(
        self, *, pages: int, page_size: int, max_length: int, max_queue: int = 256, max_sessions_per_peer: int = 256
    ) -> None:
        self.pages, self.page_size, self.max_length = pages, page_size, max_length
        self.max_queue, self.max_sessions_per_peer = max_queue, max_sessions_per_peer
        self._running: list[Ticket] = []
        self._queue: list[Ticket] = []

    @property
    def promised(self) -> int:
        """Pages promised to running sessions."""
        return sum(ticket.pages for ticket in self._running)

    @property
    def free_tokens(self) -> int:
        return (self.pages - self.promised) * self.page_size

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def pages_for(self, rows: int, max_length: int, kept: int | None = None) -> int:
        """Pages that a session may come to hold. Raises `TooLong` or `CacheFull` if it can never be served here.

        :param kept: tokens per row that it holds at most, however long it becomes: where all blocks have windows
        """
        if max_length > self.max_length:
            raise TooLong(f"max_length {max_length} is past this server's limit of {self.max_length} tokens per row")
        pages = rows * -(-max_length // self.page_size)
        if kept is not None:  # which may begin and end inside a page
            pages = min(pages, rows * (-(-kept // self.page_size) + 1))
        if pages > self.pages:
            raise CacheFull(
                f"{rows} rows of {max_length} tokens need {pages * self.page_size} tokens of cache; "
                f"this server has {self.pages * self.page_size} in all"
            )
        return pages

    def ask(
        self,
        pages: int,
        *,
        bid: float = 0.0,
        peer: str = "",
        changed: Callable[[], None] = lambda: None,
        queue: bool = True,
    ) -> Ticket:
        """A ticket, granted at once if nobody waits and there is room.

        Raises `Busy` if even the queue is full, or if the ticket would have to wait and `queue` is False.
        """
        mine = sum(ticket.peer == peer for ticket in (*self._running, *self._queue))
        if mine >= self.max_sessions_per_peer:
            raise Busy(f"you have {mine} sessions here already, which is the limit for one peer")
        ahead = [ticket.pages for ticket in self._queue if ticket.bid >= bid]
        must_finish = self._must_finish([*ahead, pages])[-1]
        if must_finish and not queue:
            raise Busy("this server is full", queue_length=must_finish)
        if must_finish and len(self._queue) >= self.max_queue:
            raise Busy("this server is full, and so is its queue", queue_length=must_finish)
        ticket = Ticket(pages, bid, peer, changed)
        self._queue.insert(len(ahead), ticket)
        self._update(tell=ticket)
        return ticket

    def extend(self, ticket: Ticket, pages: int) -> bool:
        """Promise a running session more. Those who wait come first: False if there is no room beside them."""
        more = pages - ticket.pages
        if more > 0 and (self._queue or self.promised + more > self.pages):
            return False
        ticket.pages = max(ticket.pages, pages)
        return True

    def leave(self, ticket: Ticket) -> None:
        """The session ended, its pages are free; or it gave up waiting. May be called twice."""
        for tickets in (self._running, self._queue):
            if ticket in tickets:
                tickets.remove(ticket)
                self._update()
                return

    def _update(self, tell: Ticket | None = None) -> None:
        """Let in whoever has room, count again what the others wait for, and call them (`tell` knows already)."""
        changed: list[Ticket] = []
        while self._queue and self.promised + self._queue[0].pages <= self.pages:
            ticket = self._queue.pop(0)
            ticket.granted, ticket.queue_length = True, 0
            self._running.append(ticket)
            changed.append(ticket)
        lengths = self._must_finish([ticket.pages for ticket in self._queue])
        for ticket, length in zip(self._queue, lengths, strict=True):
            if length != ticket.queue_length:
                ticket.queue_length = length
                changed.append(ticket)
        for ticket in changed:
            if ticket is not tell:
                ticket.changed()

    def _must_finish(self, queue: Sequence[int]) -> list[int]:
        """For each of a queue that wants so many pages: how many sessions must end before it starts.

        They are taken to end in the order in which they start.
        """
        free = self.pages - self.promised
        running = deque(ticket.pages for ticket in self._running)
        ended, counts = 0, []
        for pages in queue:
            while free < pages:
                free += running.popleft()
                ended += 1
            free -= pages
            running.append(pages)
            counts.append(ended)
        return counts
