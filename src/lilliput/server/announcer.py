"""What a server tells the swarm about itself, as long as it lives."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import lilliput
from lilliput.errors import ServerFailure
from lilliput.server.followers import Followers
from lilliput.server.service import Service
from lilliput.swarm import directory
from lilliput.swarm.node import Node
from lilliput.swarm.placement import Span
from lilliput.swarm.records import ServerRecord

logger = logging.getLogger(__name__)

#: whether a server has something to do at all, and how full it is, is told no later than this (seconds)
_NEWS_SECONDS = 1.0


@dataclass
class Announcer:
    """Announces one server, and withdraws it.

    :param name: what its owner calls it
    :param model_blocks: of the whole model
    :param lease_seconds: how long an announcement counts; it is made anew at a third of it, or when there is news
    :param throughput: tokens per second through the span when several streams come together, as measured
    :ivar moving_to: the span for which the server wants to leave its own
    :param uid_prefix: also declare the blocks as hivemind's experts `PREFIX.N`; empty: do not
    """

    node: Node
    service: Service
    name: str
    fingerprint: str
    model_blocks: int
    dtype: str
    addresses: Sequence[str]
    lease_seconds: float
    uid_prefix: str = ""
    throughput: float | None = None
    moving_to: Span | None = None
    started_at: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        self._told = self._load()
        self._followers = Followers(self.node, self.service.model, self.service.span.end)

    async def announce(self) -> None:
        """Tell how things are now."""
        self._told = self._load()
        await directory.announce(self.node, self._record(), self.lease_seconds)
        if self.uid_prefix:
            span = self.service.span.start, self.service.span.end
            await directory.declare_uids(self.node, self.uid_prefix, span, 2 * self.lease_seconds)

    async def go_on(self) -> None:
        """Announce again and again. Raises `ServerFailure` when the engine has failed: nothing is served any more."""
        watching = asyncio.ensure_future(self._followers.watch(self.lease_seconds / 3))
        try:
            while True:
                await self._until_due()
                if self.service.engine.failed:
                    raise ServerFailure("the engine has failed, and the server leaves; its log says why")
                try:
                    await self.announce()
                except Exception as e:  # the network may come back
                    logger.warning("could not announce this server to the swarm: %s", e)
        finally:
            watching.cancel()

    async def _until_due(self) -> None:
        """For a third of the lease, or less if there is news that others choose their servers by."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self.lease_seconds / 3
        while (left := until - loop.time()) > 0:
            await asyncio.sleep(min(left, _NEWS_SECONDS))
            if self._load() != self._told:
                return

    def _load(self) -> tuple[bool, bool, int]:
        """How much the server has to do, roughly."""
        admission = self.service.admission
        free = 4 * admission.free_tokens // max(1, admission.pages * admission.page_size)
        return admission.running > 0, admission.waiting > 0, free

    async def withdraw(self) -> None:
        """Say goodbye: nobody who looks from now on finds the server."""
        await directory.withdraw(self.node, self._record())

    def _record(self) -> ServerRecord:
        service = self.service
        rates, admission = service.engine.rates, service.admission
        return ServerRecord(
            peer_id=str(self.node.peer_id),
            model=service.model,
            name=self.name,
            fingerprint=self.fingerprint,
            model_blocks=self.model_blocks,
            start=service.span.start,
            end=service.span.end,
            state="draining" if service.draining else "serving",
            dtype=self.dtype,
            max_length=admission.max_length,
            cache_tokens=admission.tokens,
            cache_tokens_free=admission.free_tokens,
            sessions=admission.running,
            queue_length=admission.waiting,
            tokens_per_second=rates.session_tokens_per_second or None,
            prefill_tokens_per_second=rates.prefill_tokens_per_second or None,
            step_ms=rates.decode_round_seconds * 1e3 or None,
            throughput=self.throughput,
            moving_to=self.moving_to,
            followers=self._followers.nearest,
            adapters=tuple(service.span.adapters),
            version=lilliput.__version__,
            started_at=self.started_at,
            addresses=tuple(self.addresses),
        )
