"""What keeps a peer from writing in another's name into the DHT, and from writing over what others wrote.

An entry under the subkey `signed:PEER_ID` counts only with that peer's signature over key, subkey, value and lease end:
every node refuses others when it is asked to store them, and when it is told about them. The signature and the public
key, from which the peer id follows, travel behind the value.
"""

from __future__ import annotations

import dataclasses
import struct
from functools import lru_cache

from hivemind.dht import DHTNode
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.utils import MSGPackSerializer

from lilliput.swarm.identity import Identity, is_signed, peer_id_of

_MARK = "signed:"
_LENGTHS = struct.Struct("!HH")
#: the same entries come again from every node that keeps them
_REMEMBERED = 1 << 13


def signed_subkey(peer_id: str) -> str:
    """The subkey under which only this peer can write."""
    return _MARK + peer_id


def owner_of(subkey: object) -> str | None:
    """The peer that alone can write under a subkey; None if everyone can."""
    return subkey.removeprefix(_MARK) if isinstance(subkey, str) and subkey.startswith(_MARK) else None


class Signatures(RecordValidatorBase):
    """Signs what this peer stores under its own subkey, and checks what others have signed."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._subkey = signed_subkey(str(identity.peer_id))
        self._dictionaries: set[bytes] = set()

    def expect_dictionary(self, dht: DHTNode, key: str) -> None:
        """From now on, believe nobody who says that there is a single value instead of subkeys under this key."""
        key_id = DHTID.generate(source=key)
        if key_id.to_bytes() not in self._dictionaries:
            self._dictionaries.add(key_id.to_bytes())
            found = dht.protocol.storage.get(key_id)
            if found is not None and not isinstance(found.value, DictionaryDHTValue):
                del dht.protocol.storage[key_id]

    def validate(self, record: DHTRecord) -> bool:
        if record.subkey == DHTProtocol.IS_REGULAR_VALUE:
            return record.key not in self._dictionaries
        return _is_valid(record)

    def sign_value(self, record: DHTRecord) -> bytes:
        if _subkey(record) != self._subkey:
            return record.value
        public_key, signature = self._identity.public_key, self._identity.sign(_signed_part(record))
        return b"".join((record.value, public_key, signature, _LENGTHS.pack(len(public_key), len(signature))))

    def strip_value(self, record: DHTRecord) -> bytes:
        return record.value if owner_of(_subkey(record)) is None else _split(record.value)[0]


@lru_cache(_REMEMBERED)
def _is_valid(record: DHTRecord) -> bool:
    try:
        owner = owner_of(_subkey(record))
        if owner is None:
            return True
        value, public_key, signature = _split(record.value)
        if str(peer_id_of(public_key)) != owner:
            return False
        return is_signed(_signed_part(dataclasses.replace(record, value=value)), signature, public_key)
    except Exception:  # bytes that are no entry at all
        return False


def _subkey(record: DHTRecord) -> object:
    return MSGPackSerializer.loads(record.subkey)


def _signed_part(record: DHTRecord) -> bytes:
    part = ["lilliput record", record.key, _subkey(record), record.value, float(record.expiration_time)]
    return bytes(MSGPackSerializer.dumps(part))


def _split(signed: bytes) -> tuple[bytes, bytes, bytes]:
    """Value, public key and signature."""
    key_length, signature_length = _LENGTHS.unpack(signed[-_LENGTHS.size :])
    body = signed[: -_LENGTHS.size]
    key_at, signature_at = len(body) - key_length - signature_length, len(body) - signature_length
    if key_at < 0:
        raise ValueError("lengths beyond the entry")
    return body[:key_at], body[key_at:signature_at], body[signature_at:]
