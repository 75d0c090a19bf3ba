"""Keys of token prefixes, by which a server finds attention cache that it computed before.

A key covers `GRAIN` tokens and all before them (a chained hash), the model, the adapter, and whatever `salt` the
client adds. Hidden states are not hashed: the same tokens differ in their last bits with the batch that they were
computed in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

#: tokens per key. A server's page holds a multiple of it.
GRAIN = 16
KEY_BYTES = 16


def prefix_keys(tokens: Sequence[int], *, salt: bytes) -> list[bytes]:
    """One key of `KEY_BYTES` bytes for each whole grain of `tokens`."""
    keys: list[bytes] = []
    key = hashlib.blake2b(salt, digest_size=KEY_BYTES).digest()
    for start in range(0, len(tokens) - GRAIN + 1, GRAIN):
        chunk = b"".join(int(token).to_bytes(4, "little") for token in tokens[start : start + GRAIN])
        key = hashlib.blake2b(key + chunk, digest_size=KEY_BYTES).digest()
        keys.append(key)
    return keys
