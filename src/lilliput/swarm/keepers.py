"""The nodes of the DHT that keep a key's entries, remembered between two of one's own.

hivemind looks for them each time, and whoever it asks answers with all that he keeps under the key: a server would be
told the records of hundreds of others for each of its own.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

from hivemind.dht import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import PeerID

from lilliput.swarm.signatures import Signatures

#: so many of the nodes nearest to a key are asked, twice as many as keep it
BEAM = 10
#: then it is looked again who they are (seconds)
_FRESH_SECONDS = 60.0


class Keepers:
    """Of one key."""

    def __init__(self, dht: DHTNode, signatures: Signatures, key: str) -> None:
        self._dht, self._signatures = dht, signatures
        self._key = DHTID.generate(source=key)
        self._nodes: dict[DHTID, PeerID] = {}
        self._found = 0.0

    async def store(self, subkey: str, value: bytes, end: float) -> bool:
        """Have an entry kept until `end`. False if no other peer does, where there are others."""
        if self._changed():
            await self._search()
        dumps = self._dht.protocol.serializer.dumps
        record = DHTRecord(self._key.to_bytes(), dumps(subkey), dumps(value), end)
        record = replace(record, value=self._signatures.sign_value(record))
        answers = await self._ask_others(subkey, record)
        if None in answers:  # one of them is gone
            await self._search()
            answers += await self._ask_others(subkey, record)
        mine = False
        if self._dht.node_id in self._nodes and self._signatures.validate(record):
            mine = bool(self._dht.protocol.storage.store(self._key, record.value, end, subkey=subkey))
        answered = [answer for answer in answers if answer is not None]
        return any(answered) if answered else mine

    async def _ask_others(self, subkey: str, record: DHTRecord) -> list[bool | None]:
        """What each says; None: nothing."""

        async def ask(peer: PeerID) -> bool | None:
            end = record.expiration_time
            answer: Any = await self._dht.protocol.call_store(peer, [self._key], [record.value], end, subkeys=[subkey])
            return bool(answer[0]) if answer else None

        others = [ask(peer) for node, peer in self._nodes.items() if node != self._dht.node_id]
        return list(await asyncio.gather(*others))

    async def _search(self) -> None:
        replicas = self._dht.num_replicas
        found = await self._dht.find_nearest_nodes([self._key], k_nearest=replicas, beam_size=BEAM)
        self._nodes, self._found = found[self._key], time.monotonic()

    def _changed(self) -> bool:
        """Whether it may be others by now: a while has passed, or there are nearer nodes."""
        if not self._nodes or time.monotonic() - self._found >= _FRESH_SECONDS:
            return True
        dht = self._dht
        near = dht.protocol.routing_table.get_nearest_neighbors(self._key, dht.num_replicas, exclude=dht.node_id)
        farthest = max(map(self._key.xor_distance, self._nodes))
        few = len(self._nodes) < dht.num_replicas
        return any(node not in self._nodes and (few or self._key.xor_distance(node) < farthest) for node, _ in near)
