"""One server's part in a chain."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

from lilliput.client.remote import RemoteModel
from lilliput.client.route import Hop
from lilliput.client.server_session import QueueCallback, ServerSession
from lilliput.errors import Busy, LilliputError, Unreachable

#: parts of one step that may be on their way at a time, through one server or several that push
_PARTS_AT_ONCE = 8
#: how often a session that expired while its neighbours still queued is opened anew
_REOPENINGS = 3


class Leg:
    """A session on one server, and how far its server has come.

    :ivar sent: tokens per row that its server has been sent since position 0; below 0: it takes none now
    :ivar answered: of those, so many have come back
    :ivar fed_by: who sent its server the last part: the leg before it, or None: we did
    :ivar ids: of steps, the same for all legs of a chain: servers tell by them what is late
    :ivar places: for parts that are on their way
    """

    def __init__(self, session: ServerSession, ids: Iterator[int]) -> None:
        self.session, self.ids = session, ids
        self.sent = self.answered = 0
        self.fed_by: Leg | None = None
        self.places = asyncio.Semaphore(_PARTS_AT_ONCE)
        self._changed: asyncio.Event | None = None

    @property
    def hop(self) -> Hop:
        return self.session.hop

    @property
    def start(self) -> int:
        return self.hop.start

    @property
    def end(self) -> int:
        return self.hop.end

    @property
    def idle(self) -> bool:
        return self.sent == self.answered

    def takes(self, begin: int, source: Leg | None) -> bool:
        """Whether a part that begins there may be sent to its server now, by the leg before it or (None) by us.

        What comes from two sides keeps no order: what one has sent must be answered before the other sends.
        """
        return self.sent == begin and (self.idle or self.fed_by is source)

    def stand_at(self, position: int) -> None:
        """The server's cache counts up to `position`."""
        self.sent = self.answered = position
        self.wake()

    def back_to(self, position: int) -> None:
        """What was sent beyond `position` is sent once more."""
        self.sent, self.answered = min(self.sent, position), min(self.answered, position)
        self.wake()

    def wake(self) -> None:
        """Whoever waits for this leg looks again."""
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    async def changed(self) -> None:
        """Wait until something was sent or has come back, or until the leg is replaced."""
        if self._changed is None:
            self._changed = asyncio.Event()
        await self._changed.wait()


async def open_legs(
    remote: RemoteModel,
    hops: Sequence[Hop],
    failed: set[str],
    *,
    max_length: int,
    rows: int,
    prefix: bytes,
    bid: float,
    session_id: bytes,
    request_id: str,
    resumes: bool,
    on_queue: QueueCallback | None,
    ids: Iterator[int],
) -> list[Leg]:
    """Sessions on all servers of a chain, opened at the same time, or none. Adds to `failed` who refused."""
    opened: dict[Hop, ServerSession] = {}

    async def open_one(hop: Hop) -> None:
        try:
            opened[hop] = await ServerSession.open(
                remote,
                hop,
                max_length=max_length,
                rows=rows,
                prefix=prefix,
                bid=bid,
                session_id=session_id,
                request_id=request_id,
                resumes=resumes,
                on_queue=on_queue,
            )
        except LilliputError as e:
            failed.add(hop.peer_id)
            if isinstance(e, Unreachable):
                remote.connection.ban(hop.peer_id)
            elif isinstance(e, Busy):
                remote.connection.note_full(hop.peer_id)
            raise

    try:
        for _ in range(_REOPENINGS):
            # one that was accepted at once may expire while another is still in a queue
            due = [hop for hop in hops if hop not in opened or opened[hop].broken is not None]
            if not due:
                break
            results = await asyncio.gather(*map(open_one, due), return_exceptions=True)
            errors = [result for result in results if isinstance(result, BaseException)]
            if errors:
                raise errors[0]
        return [Leg(opened[hop], ids) for hop in hops]
    except BaseException:
        await asyncio.gather(*(session.close() for session in opened.values()))
        raise


async def close_legs(legs: Sequence[Leg]) -> None:
    """Give the caches of their sessions back. May be called twice."""
    await asyncio.gather(*(leg.session.close() for leg in legs))
