"""Where servers leave their records and clients find them: one DHT key per model, one subkey per server.

    lilliput:1:<model>   subkey: signed:<the server's peer id>   value: its `ServerRecord`
    lilliput:1           subkey: the model's name                value: how many blocks it has

A record counts until its lease ends, unless it is announced again. A server that leaves overwrites its record with an
empty one, which outlives it. Both are signed with the key from which the server's peer id follows, and every node
refuses what is not (see `signatures`): nobody can announce a server, change what it says or take it away but itself.
What a server says about itself is its own affair. The list of models is a hint that anyone may write.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from hivemind.moe.expert_uid import FLAT_EXPERT, UID_DELIMITER, is_valid_uid
from hivemind.utils import get_dht_time

from lilliput.errors import BadRequest, Unreachable
from lilliput.swarm.keepers import BEAM
from lilliput.swarm.node import Node
from lilliput.swarm.records import MOST_BLOCKS, ServerRecord
from lilliput.swarm.signatures import owner_of, signed_subkey

#: how long an announcement counts (seconds); announce again at a third of it
LEASE_SECONDS = 15.0
FIND_SECONDS = 10.0

_REGISTRY = "lilliput:1"
_GONE = b""
#: no lease is longer (seconds): its server would be found long after it died
MOST_LEASE_SECONDS = 60.0
#: a model is named for so many leases
_HINT_LEASES = 3
#: clocks that differ by so much are put up with (seconds)
_CLOCKS_SECONDS = 30.0
#: a later expiration wins, and clocks and floats are what they are
_MARGIN_SECONDS = 1e-3


@dataclass(frozen=True)
class Announcement:
    """A record, and when its lease ends (seconds since the epoch)."""

    record: ServerRecord
    lease_end: float

    @property
    def counts(self) -> bool:
        """Whether the server has announced itself lately; one that was killed has not."""
        return 0 < self.lease_end - float(get_dht_time()) < MOST_LEASE_SECONDS + _CLOCKS_SECONDS


async def announce(node: Node, record: ServerRecord, lease_seconds: float = LEASE_SECONDS) -> bool:
    """Tell the swarm about this node's server, or that it still lives. False if no peer kept the record."""
    lease_seconds = min(lease_seconds, MOST_LEASE_SECONDS)
    storing = [_store_own(node, record, record.to_bytes(), lease_seconds)]
    if node.lease_ends.get((_REGISTRY, record.model), 0.0) < float(get_dht_time()) + lease_seconds / 2:
        # whose word on the model is the latest does not matter, so it need not be said each time
        hint = _REGISTRY, record.model, record.model_blocks
        storing.append(_store(node, [hint], _HINT_LEASES * lease_seconds))
    kept, *_ = await asyncio.gather(*storing)
    return kept


async def withdraw(node: Node, record: ServerRecord) -> bool:
    """Say goodbye: nobody who looks from now on finds the server."""
    return await _store_own(node, record, _GONE, 0.0)


async def find(node: Node, model: str) -> list[ServerRecord]:
    """All servers of a model that have announced themselves, in the order of their blocks."""
    return [announcement.record for announcement in await look_up(node, model)]


async def look_up(node: Node, model: str) -> list[Announcement]:
    """What `find` finds, with the ends of the leases: for those who keep it."""
    found = []
    for subkey, (value, lease_end) in (await _latest(node, _key(model))).items():
        record = ServerRecord.from_bytes(value)
        if record is not None and record.peer_id == owner_of(subkey) and record.model == model:
            found.append(Announcement(record, lease_end))
    return sorted((a for a in found if a.counts), key=lambda a: (a.record.start, a.record.end, a.record.peer_id))


async def models(node: Node) -> dict[str, int]:
    """The models that were announced lately, and how many blocks each has (0 if unknown): hints, which nobody signs."""
    found = await _latest(node, _REGISTRY)
    return {
        name: blocks if isinstance(blocks, int) and 0 <= blocks <= MOST_BLOCKS else 0
        for name, (blocks, _) in sorted(found.items(), key=lambda item: str(item[0]))
        if isinstance(name, str) and name.isprintable()  # a terminal would obey some of the others
    }


async def declare_uids(
    node: Node, prefix: str, span: tuple[int, int], lease_seconds: float = 2 * LEASE_SECONDS
) -> bool:
    """Declare blocks `[start, end)` as hivemind's experts `PREFIX.N`, so that its `get_experts` finds them.

    The very entries that `hivemind.moe.server.declare_experts` writes; that one needs a DHT in a forked process.
    """
    if UID_DELIMITER in prefix or not is_valid_uid(f"{prefix}{UID_DELIMITER}0"):
        raise BadRequest(f"hivemind's UIDs have the form PREFIX.N; {prefix!r} cannot be a prefix")
    me = node.peer_id.to_base58()
    entries: list[tuple[str, Any, Any]] = []
    for index in range(*span):
        uid = f"{prefix}{UID_DELIMITER}{index}"
        entries.append((uid, None, me))
        entries.append((f"{uid}{UID_DELIMITER}", FLAT_EXPERT, (uid, me)))
    return await _store(node, entries, lease_seconds)


def _key(model: str) -> str:
    return f"{_REGISTRY}:{model}"


async def _store_own(node: Node, record: ServerRecord, value: bytes, lease_seconds: float) -> bool:
    """Say something of this node's server. False if nobody keeps it."""
    key, subkey = _key(record.model), signed_subkey(record.peer_id)
    return await node.keepers(key).store(subkey, value, _lease_end(node, key, subkey, lease_seconds))


async def _store(node: Node, entries: list[tuple[str, Any, Any]], lease_seconds: float) -> bool:
    """False if some entry was kept by nobody."""
    ends = [_lease_end(node, key, subkey, lease_seconds) for key, subkey, _ in entries]
    keys, subkeys, values = (list(column) for column in zip(*entries, strict=True))
    return all((await node.dht.store_many(keys, values, ends, subkeys=subkeys, beam_size=BEAM)).values())


def _lease_end(node: Node, key: str, subkey: Any, lease_seconds: float) -> float:
    """Later than that of the last entry, which it is to replace."""
    now = float(get_dht_time())
    end = max(now + lease_seconds, node.lease_ends.get((key, subkey), now) + _MARGIN_SECONDS)
    node.lease_ends[key, subkey] = end
    return end


async def _latest(node: Node, key: str) -> dict[Any, tuple[Any, float]]:
    """Subkeys, their values and when those end.

    Asked from the network: the local cache would go on showing who has left.
    """
    node.signatures.expect_dictionary(node.dht, key)
    try:
        async with asyncio.timeout(FIND_SECONDS):
            found = await node.dht.get(key, latest=True, beam_size=BEAM)
    except TimeoutError as e:
        raise Unreachable(f"no peer answered within {FIND_SECONDS:.0f} s what it knows of {key!r}") from e
    if found is None or not isinstance(found.value, dict):
        return {}
    return {subkey: (entry.value, float(entry.expiration_time)) for subkey, entry in found.value.items()}
