"""What a session has seen: the token ids of every row, and the keys of their grains (see `wire.prefix`)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from lilliput.wire.prefix import GRAIN, KEY_BYTES

#: in place of a token that the mask hides
PADDING = -1
#: in place of hidden states that come from no token that we know of
UNKNOWN = -2


class TokenHistory:
    """Token ids `[rows, length]` with rollback and reordering, and a chained key for each grain of known tokens.

    A key equals `wire.prefix.prefix_keys` of the row. From the first unknown token on, a row has no keys.
    """

    def __init__(self, salt: bytes | None) -> None:
        """:param salt: what the keys begin with; None: there are none"""
        self._root = None if salt is None else hashlib.blake2b(salt, digest_size=KEY_BYTES).digest()
        self._tokens = torch.empty(0, 0, dtype=torch.int64)
        self._keys: list[list[bytes]] = []
        self._length = 0

    @property
    def length(self) -> int:
        return self._length

    @property
    def rows(self) -> int:
        return self._tokens.shape[0]

    @property
    def tokens(self) -> torch.Tensor:
        """int64 `[rows, length]`, with `PADDING` and `UNKNOWN`."""
        return self._tokens[:, : self._length]

    def append(self, tokens: torch.Tensor) -> bytes:
        """Add `tokens` `[rows, n]`; return the keys of the grains that this completes, `[rows, k]` digests.

        Empty unless every row has keys for them all.
        """
        rows, count = tokens.shape
        if self._length == 0 and rows != self.rows:
            self._tokens = torch.empty(rows, 0, dtype=torch.int64)
            self._keys = [[] for _ in range(rows)]
        before, after = self._length, self._length + count
        if after > self._tokens.shape[1]:
            grown = torch.empty(rows, max(2 * after, 64), dtype=torch.int64)
            grown[:, :before] = self._tokens[:, :before]
            self._tokens = grown
        self._tokens[:, before:after] = tokens
        self._length = after
        first, last = before // GRAIN, after // GRAIN
        if first == last:
            return b""
        for row, keys in enumerate(self._keys):
            if len(keys) == first:
                keys.extend(
                    self._chain(keys[-1] if keys else self._root, self._tokens[row, first * GRAIN : last * GRAIN])
                )
        if any(len(keys) < last for keys in self._keys):
            return b""
        return b"".join(key for keys in self._keys for key in keys[first:last])

    def keys(self, begin: int, end: int, rows: int) -> bytes:
        """The keys of the grains that tokens `[begin, end)` complete in the first `rows` rows, `[rows, k]` digests.

        Empty unless all of these rows have keys for them all; from 0 on, only of as many grains as they all have.
        """
        first, last = begin // GRAIN, end // GRAIN
        known = [row[first:last] for row in self._keys[:rows]]
        fewest = min(map(len, known), default=0)
        if len(known) < rows or (begin and fewest < last - first):
            return b""
        return b"".join(key for row in known for key in row[:fewest])

    def keys_of(self, tokens: torch.Tensor) -> bytes:
        """The keys of the whole grains of `tokens` `[rows, n]` at the start of a session, `[rows, n // GRAIN]` digests.

        Only of as many grains as are known in every row.
        """
        rows = [self._chain(self._root, row[: len(row) // GRAIN * GRAIN]) for row in tokens]
        known = min(len(keys) for keys in rows)
        return b"".join(key for keys in rows for key in keys[:known])

    def crop(self, length: int) -> None:
        """Forget what lies beyond `length`."""
        if length < self._length:
            self._length = length
            for keys in self._keys:
                del keys[length // GRAIN :]

    def reorder(self, parents: Sequence[int]) -> None:
        """New row i continues old row `parents[i]`. The number of rows may change."""
        self._tokens = self._tokens[torch.tensor(parents, dtype=torch.int64)]
        self._keys = [list(self._keys[parent]) for parent in parents]

    def continues(self, tokens: torch.Tensor) -> tuple[list[int], int]:
        """How `tokens` `[any rows, n]` can be reached from here: for each of its rows the row to continue, and how many
        leading tokens every one of them shares with that."""
        count = min(tokens.shape[1], self._length)
        if not count or not self.rows:
            return [], 0
        new, old = tokens[:, None, :count], self._tokens[None, :, :count]
        same = (new == old) & (new != UNKNOWN)  # [new rows, old rows, count]
        shared = same.to(torch.uint8).cumprod(dim=2).sum(dim=2)
        best, parents = shared.max(dim=1)
        return parents.tolist(), int(best.min())

    @staticmethod
    def _chain(key: bytes | None, tokens: torch.Tensor) -> list[bytes]:
        keys: list[bytes] = []
        if key is None:
            return keys
        numbers = tokens.tolist()
        for start in range(0, len(numbers), GRAIN):
            grain = numbers[start : start + GRAIN]
            if min(grain) < 0:
                break
            data = b"".join(number.to_bytes(4, "little") for number in grain)
            key = hashlib.blake2b(key + data, digest_size=KEY_BYTES).digest()
            keys.append(key)
        return keys


def for_all_rows(keys: bytes, rows: int, max_rows: int) -> bytes:
    """The keys of `rows` rows, and for those that will be made from the last of them, that one's: `[max_rows, n]`."""
    each = len(keys) // rows if rows else 0
    return keys + keys[len(keys) - each :] * (max_rows - rows) if each else b""
