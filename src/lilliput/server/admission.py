"""Who may start a session now, and who waits in which place. Bookkeeping of promises; no sockets, no tensors.

A session is promised cache for its whole `max_length`; the sum of promises never exceeds the pool, so a session that
was let in can always grow to its end. (Pages themselves are taken as they fill.) A higher bid stands earlier in the
queue; among equal bids, first come first served. Nobody is overtaken by a smaller request behind: a large one would
wait for ever.

One peer may have everything as long as no other wants any of it. Where several do, each has an equal share: who asks
for no more than that comes before those who ask for more, whatever they bid, and sessions of a peer that holds more
are ended for it, those first that have not been used for longest. They have had some seconds by then, and go on
elsewhere, or here when there is room.
"""

from __future__ import annotations

import itertools
import time
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Sequence

from lilliput.errors import Busy, CacheFull, TooLong


def pages_of_row(length: int, kept: Sequence[int | None], page_size: int) -> int:
    """Pages that a row of so many tokens may hold. `kept` as in `Admission.pages_for`."""
    whole = -(-length // page_size)
    # what is kept may begin and end inside a page
    return sum(whole if most is None else min(whole, -(-most // page_size) + 1) for most in kept)


def longest_row(pages: int, kept: Sequence[int | None], page_size: int) -> int | None:
    """Tokens of the longest row for which so many pages are enough; None: there is no limit."""
    counts = range(pages + 2)
    fitting = bisect_right(counts, pages, key=lambda count: pages_of_row(count * page_size, kept, page_size)) - 1
    return None if fitting > pages else fitting * page_size


class Ticket:
    """A session's place: granted, or in the queue.

    :ivar granted: the promise holds
    :ivar queue_length: how many sessions must finish first; 0 if granted
    :ivar changed: called when either changes
    :ivar evict: called, once, when the session must end for another peer's; then it is to leave
    :ivar number: the first to come has the lowest
    :ivar granted_at, used_at: on the clock of the `Admission`; whoever uses the session sets the second
    """

    def __init__(
        self,
        number: int,
        pages: int,
        bid: float,
        peer: str,
        changed: Callable[[], None],
        evict: Callable[[], None],
    ) -> None:
        self.number, self.pages, self.bid, self.peer = number, pages, bid, peer
        self.changed, self.evict = changed, evict
        self.granted = self.evicted = False
        self.queue_length = 0
        self.granted_at = self.used_at = 0.0


class Admission:
    """Promises of a pool of `pages` pages.

    :param groups: of blocks, each of which needs pages of its own for a token
    :param max_length: tokens per row that a session may ask for
    :param max_queue: sessions that may wait
    :param max_sessions_per_peer: running and waiting sessions that one peer may have
    :param peer_share: of the pool, at most so much for one peer's sessions
    :param fair_seconds: a session beyond its peer's equal share is left alone for so long, even if others wait
    """

    def __init__(
        self,
        *,
        pages: int,
        page_size: int,
        max_length: int,
        groups: int = 1,
        max_queue: int = 256,
        max_sessions_per_peer: int = 256,
        peer_share: float = 1.0,
        fair_seconds: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pages, self.page_size, self.max_length, self.groups = pages, page_size, max_length, groups
        self.max_queue, self.max_sessions_per_peer = max_queue, max_sessions_per_peer
        self.most_pages = max(1, int(pages * peer_share))
        self.fair_seconds, self.clock = fair_seconds, clock
        self._numbers = itertools.count()
        self._running: list[Ticket] = []
        self._queue: list[Ticket] = []

    @property
    def promised(self) -> int:
        """Pages promised to running sessions."""
        return sum(ticket.pages for ticket in self._running)

    @property
    def tokens(self) -> int:
        """Room for so many tokens in all blocks, over all rows of all sessions."""
        return self._tokens(self.pages)

    @property
    def free_tokens(self) -> int:
        """Of those, so many are not promised."""
        return self._tokens(self.pages - self.promised)

    def _tokens(self, pages: int) -> int:
        return pages // self.groups * self.page_size

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def pages_for(self, rows: int, max_length: int, kept: Sequence[int | None] = (None,)) -> int:
        """Pages that a session may come to hold. Raises `TooLong` or `CacheFull` if it can never be served here.

        :param kept: for each group of its blocks, tokens per row that it holds at most, however long it becomes: where
            they have windows; None: all
        """
        if max_length > self.max_length:
            raise TooLong(f"max_length {max_length} is past this server's limit of {self.max_length} tokens per row")
        pages = rows * pages_of_row(max_length, kept, self.page_size)
        if pages > self.most_pages:
            raise CacheFull(
                f"{rows} rows of {max_length} tokens need {self._tokens(pages)} tokens of cache; "
                f"this server has {self._tokens(self.most_pages)} for one peer"
            )
        return pages

    def ask(
        self,
        pages: int,
        *,
        bid: float = 0.0,
        peer: str = "",
        changed: Callable[[], None] = lambda: None,
        evict: Callable[[], None] = lambda: None,
        queue: bool = True,
    ) -> Ticket:
        """A ticket, granted at once if nobody waits and there is room.

        Raises `Busy` if even the queue is full, if the peer has all that one may have, or if the ticket would have to
        wait for others to end by themselves and `queue` is False.
        """
        mine = [ticket for ticket in (*self._running, *self._queue) if ticket.peer == peer]
        if len(mine) >= self.max_sessions_per_peer:
            raise Busy(f"you have {len(mine)} sessions here already, which is the limit for one peer", queue_length=1)
        if sum(ticket.pages for ticket in mine) + pages > self.most_pages and self.most_pages < self.pages:
            most = self._tokens(self.most_pages)
            raise Busy(f"your sessions would come to more than {most} tokens, the limit for one peer", queue_length=1)
        ticket = Ticket(next(self._numbers), pages, bid, peer, changed, evict)
        order = self._in_order([*self._queue, ticket])
        place = order.index(ticket)
        must_finish = self._must_finish([other.pages for other in order[: place + 1]])[-1]
        fair = self._fair(ticket, order)
        if must_finish and not queue and not (fair and self._victims(order, place + 1) is not None):
            raise Busy("this server is full", queue_length=must_finish)
        if must_finish and len(self._queue) >= self.max_queue and not fair:
            raise Busy("this server is full, and so is its queue", queue_length=must_finish)
        self._queue = order
        self._update(tell=ticket)
        return ticket

    def refresh(self) -> None:
        """Look again whether somebody has held too much for long enough: while others wait, now and then."""
        self._update()

    def extend(self, ticket: Ticket, pages: int) -> bool:
        """Promise a running session more. Those who wait come first: False if there is no room beside them."""
        more = pages - ticket.pages
        held = sum(other.pages for other in self._running if other.peer == ticket.peer)
        if more > 0 and (self._queue or self.promised + more > self.pages or held + more > self.most_pages):
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
        self._queue = self._in_order(self._queue)
        while self._queue and self.promised + self._queue[0].pages <= self.pages:
            ticket = self._queue.pop(0)
            ticket.granted, ticket.queue_length = True, 0
            ticket.granted_at = ticket.used_at = self.clock()
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
        victims: list[Ticket] = []
        for place, ticket in enumerate(self._queue):
            if not self._fair(ticket, self._queue) or (more := self._victims(self._queue, place + 1)) is None:
                break
            victims = more
        for victim in victims:
            victim.evicted = True
        for victim in victims:
            victim.evict()

    def _share(self, waiting: Sequence[Ticket]) -> int:
        """Pages for each peer that has or wants some, if all get the same."""
        return self.pages // max(1, len({ticket.peer for ticket in (*self._running, *waiting)}))

    def _in_order(self, waiting: Sequence[Ticket]) -> list[Ticket]:
        """Who asks for no more than an equal share first, then by bid, then by when they came."""
        share = self._share(waiting)
        sums = Counter[str]()
        for ticket in self._running:
            sums[ticket.peer] += ticket.pages
        order: list[tuple[bool, Ticket]] = []
        for ticket in sorted(waiting, key=lambda ticket: (-ticket.bid, ticket.number)):
            sums[ticket.peer] += ticket.pages
            order.append((sums[ticket.peer] > share, ticket))
        return [ticket for _, ticket in sorted(order, key=lambda entry: entry[0])]

    def _fair(self, ticket: Ticket, waiting: Sequence[Ticket]) -> bool:
        """Whether a ticket asks for no more than what is left of its peer's equal share."""
        before = waiting[: list(waiting).index(ticket) + 1]
        mine = sum(other.pages for other in (*self._running, *before) if other.peer == ticket.peer)
        return mine <= self._share(waiting)

    def _victims(self, waiting: Sequence[Ticket], until: int) -> list[Ticket] | None:
        """Sessions whose end makes room for the first `until` of those who wait; None if there are not enough."""
        share, now = self._share(waiting), self.clock()
        held = Counter[str]()
        for ticket in self._running:
            held[ticket.peer] += 0 if ticket.evicted else ticket.pages
        needed = sum(ticket.pages for ticket in waiting[:until]) - (self.pages - sum(held.values()))
        victims: list[Ticket] = []
        for ticket in sorted(self._running, key=lambda ticket: ticket.used_at):
            if needed <= 0:
                break
            if held[ticket.peer] > share and not ticket.evicted and now - ticket.granted_at >= self.fair_seconds:
                victims.append(ticket)
                held[ticket.peer] -= ticket.pages
                needed -= ticket.pages
        return victims if needed <= 0 else None

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
