"""What a DHT node keeps for others, and how much of it.

A signed entry is taken from the peer that has signed it and from nobody else: servers announce themselves again every
few seconds, so no neighbour needs to hand their records on, and nobody can fill the directory with records of peers
that were made up. Each may have a few. Entries that nobody signs are hints: small ones, and not too many from one peer.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from hivemind.dht import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.utils import get_dht_time

from lilliput.swarm.callers import caller
from lilliput.swarm.records import MAX_RECORD_BYTES
from lilliput.swarm.signatures import owner_of

#: a server announces one record, and leaves those of models that it has served before
RECORDS_PER_PEER = 16
#: two for each block of hivemind's own kind, and the names of models
HINTS_PER_PEER = 1024
#: a value that nobody signs
HINT_BYTES = 1024
#: a record, its signature and the key that it was signed with
_SIGNED_BYTES = MAX_RECORD_BYTES + 2048
#: when so many have brought something, it is looked whose has ended
_MANY_PEERS = 1024
#: nothing is kept for longer (seconds)
_MOST_SECONDS = 300.0


def guard(dht: DHTNode) -> None:
    """Have a DHT node keep no more than it should of what others bring, and keep it from what would hide it."""
    storage = Storage()
    storage.__dict__.update(dht.protocol.storage.__dict__)  # neighbours may have handed something over already
    dht.protocol.storage, dht.protocol.cache = storage, _NoCache()


class Storage(DHTLocalStorage):
    """Of one node.

    A dictionary of subkeys never makes way for a single value, however long that claims to hold: only a single value
    for a dictionary.
    """

    def __init__(self) -> None:
        super().__init__()
        #: until when which entries are kept of what a peer has brought
        self._brought: defaultdict[str, dict[tuple[DHTID, Any], float]] = defaultdict(dict)
        self._many = _MANY_PEERS

    def store(self, key: DHTID, value: Any, expiration_time: float, subkey: Any = None) -> bool:
        if subkey is not None:
            return self.store_subkey(key, subkey, value, expiration_time)
        if isinstance(value, DictionaryDHTValue):  # its entries were let in one by one
            return bool(super().store(key, value, expiration_time))
        known = self.get(key)
        if known is not None and isinstance(known.value, DictionaryDHTValue):
            return False
        return self._may_bring(key, None, value, expiration_time) and bool(super().store(key, value, expiration_time))

    def store_subkey(self, key: DHTID, subkey: Any, value: Any, expiration_time: float) -> bool:
        if not self._may_bring(key, subkey, value, expiration_time):
            return False
        known = self.get(key)
        if known is not None and not isinstance(known.value, DictionaryDHTValue):
            del self[key]
        return bool(super().store_subkey(key, subkey, value, expiration_time))

    def _may_bring(self, key: DHTID, subkey: Any, value: bytes, expiration_time: float) -> bool:
        """Whether the peer whose call is being answered may have this kept, too."""
        peer = caller()
        if peer is None:
            return True
        owner, now = owner_of(subkey), float(get_dht_time())
        if owner not in (None, str(peer)) or expiration_time > now + _MOST_SECONDS:
            return False
        if len(value) > (HINT_BYTES if owner is None else _SIGNED_BYTES):
            return False
        name, most = (f"hints of {peer}", HINTS_PER_PEER) if owner is None else (owner, RECORDS_PER_PEER)
        brought = self._brought[name]
        if (key, subkey) not in brought and (len(brought) >= most or len(self._brought) > self._many):
            self._forget(now)
            brought = self._brought[name]
            if len(brought) >= most:
                return False
        brought[key, subkey] = max(expiration_time, brought.get((key, subkey), 0.0))
        return True

    def _forget(self, now: float) -> None:
        """What is not kept any more."""
        for name, entries in list(self._brought.items()):
            self._brought[name] = {entry: end for entry, end in entries.items() if end > now}
            if not self._brought[name]:
                del self._brought[name]
        self._many = max(_MANY_PEERS, 2 * len(self._brought))


class _NoCache(DHTLocalStorage):
    """Whoever is asked prefers what it has cached and ends later: a peer could hide the truth behind anything."""

    def store(self, *_: Any, **__: Any) -> bool:
        return False

    def store_subkey(self, *_: Any, **__: Any) -> bool:
        return False
