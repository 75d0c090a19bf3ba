"""How a server leaves its blocks: its sessions move first, or are told at least."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from lilliput.errors import Draining
from lilliput.server.announcer import Announcer

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.02
#: sessions have so long to hear that the server leaves (seconds)
FAREWELL_SECONDS = 1.0


async def drain(announcer: Announcer, stopped: asyncio.Future[Any], within: float) -> None:
    """Return when all sessions have moved, when they have had their time (seconds), or when told to stop."""
    service = announcer.service
    service.draining = True
    announcing = asyncio.ensure_future(announcer.announce())
    for stream in list(service.streams):
        stream.tell_leaving(within)
    until = time.monotonic() + within
    while (  # noqa: ASYNC110 (sessions and passes end in many places)
        (service.admission.running or service.passes) and time.monotonic() < until and not stopped.done()
    ):
        await asyncio.sleep(_LOOK_SECONDS)
    await asyncio.wait({announcing}, timeout=FAREWELL_SECONDS)  # a late one would undo the farewell
    announcing.cancel()


async def farewell(announcer: Announcer, *, leaves: bool) -> None:
    """End what sessions are left, telling them why.

    :param leaves: the swarm, too: the record is withdrawn
    """
    service = announcer.service
    service.draining = True
    withdrawing = asyncio.ensure_future(announcer.withdraw() if leaves else asyncio.sleep(0))
    streams = list(service.streams)
    for stream in streams:
        stream.end(Draining("this server is leaving; open a session elsewhere"))
    told: set[asyncio.Future[Any]] = {withdrawing, *(stream.ended for stream in streams)}
    await asyncio.wait(told, timeout=FAREWELL_SECONDS)
    withdrawing.cancel()
    logger.info("leaving these blocks; since the start: %s", service.engine.counters)
