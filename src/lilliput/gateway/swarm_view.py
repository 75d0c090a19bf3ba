"""The swarm as this gateway sees it, for the swarm page."""

from __future__ import annotations

import asyncio
import gzip
import time
from typing import Any

from starlette.responses import Response

import lilliput
from lilliput.client.costs import RoundTripTimes
from lilliput.client.route import estimate
from lilliput.errors import LilliputError, Unreachable
from lilliput.gateway.delivery import Json, dumped
from lilliput.gateway.places import Places
from lilliput.gateway.problems import nobody_there
from lilliput.gateway.served_model import ServedModel
from lilliput.swarm.held_model import HeldModel

#: a look serves everyone who asks within so many seconds
_FRESH_SECONDS = 2.0
#: longer answers are packed for browsers that can unpack them: hundreds of servers are watched from phones, too
_LONG_BYTES = 16 << 10


class SwarmView:
    """Tells what `HeldModel` does, and what this gateway would do and does. Looks only when somebody asks."""

    def __init__(self, model: ServedModel, places: Places) -> None:
        self._model, self._places = model, places
        self._looking: asyncio.Future[tuple[bytes, bytes]] | None = None
        self._looked = 0.0

    async def response(self, accepted_encodings: str = "") -> Response:
        """JSON. Raises `Problem` if nobody in the swarm answers."""
        now = time.monotonic()
        if self._looking is None or (self._looking.done() and now - self._looked >= _FRESH_SECONDS):
            self._looked, self._looking = now, asyncio.ensure_future(self._look())
            self._looking.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            plain, packed = await asyncio.shield(self._looking)
        except Unreachable as e:
            raise nobody_there() from e
        headers = {"Cache-Control": "no-store", "Vary": "Accept-Encoding"}
        if packed and "gzip" in accepted_encodings:
            return Response(packed, media_type=Json.media_type, headers=headers | {"Content-Encoding": "gzip"})
        return Response(plain, media_type=Json.media_type, headers=headers)

    async def _look(self) -> tuple[bytes, bytes]:
        remote = self._model.decoder.remote
        connection = remote.connection
        records = await connection.records(remote.name, fresh=True)
        round_trips = await connection.round_trips(records, within=0.0)
        records = sorted(records, key=lambda record: (record.start, record.end, record.peer_id))
        held = HeldModel(
            remote.name, remote.blocks, records, dict(round_trips), remote.fingerprint, connection.banned()
        )
        more = {
            "path": None if held.missing() else await self._path(round_trips),
            "requests": {"running": self._places.taken, "waiting": self._places.waiting},
            "started_at": self._model.created,
            "version": lilliput.__version__,
        }
        return await asyncio.to_thread(_written, held, more)  # of hundreds of servers: tokens do not wait for it

    async def _path(self, round_trips: RoundTripTimes) -> dict[str, Any] | None:
        """The chain that an answer would take now, and what is expected of it for each token; None if there is none."""
        remote = self._model.decoder.remote
        try:
            chain = await remote.chain(0, remote.blocks, pushes=remote.push)
        except LilliputError:  # blocks are missing, or not those of the right files: the facts tell
            return None
        expected = estimate(chain, round_trips=round_trips, pushes=remote.push)
        legs = [
            {
                "peer_id": leg.hop.peer_id,
                "start": leg.hop.start,
                "end": leg.hop.end,
                "network_ms": round(leg.network * 1e3, 2),
                "compute_ms": round(leg.compute * 1e3, 2),
            }
            for leg in expected.legs
        ]
        return {"legs": legs, "back_ms": round(expected.back * 1e3, 2), "total_ms": round(expected.total * 1e3, 2)}


def _written(held: HeldModel, more: dict[str, Any]) -> tuple[bytes, bytes]:
    """JSON of all that is seen, plain and, if it is long, packed."""
    facts = held.facts()
    for server in facts["servers"]:
        del server["addresses"]  # an affair of the swarm's members, which those who talk to it are not
    plain = dumped({**facts, **more})
    return plain, gzip.compress(plain, 4) if len(plain) > _LONG_BYTES else b""
