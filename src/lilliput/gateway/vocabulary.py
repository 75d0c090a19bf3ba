"""What single tokens stand for."""

from __future__ import annotations

import re
from functools import cache, lru_cache
from typing import Any

#: texts of so many tokens: an answer may name hundred thousands, of which most are the same
_REMEMBERED = 1 << 16
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class Vocabulary:
    """The bytes and the texts of tokens. A token may be a part of a character: then its text has a replacement sign."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._byte_level = "ByteLevel" in str(getattr(backend, "decoder", ""))
        self._special = set(tokenizer.all_special_ids)
        #: the text of a token, by its id
        self.text_of = lru_cache(_REMEMBERED)(lambda token: self.bytes_of(token).decode(errors="replace"))

    def bytes_of(self, token: int) -> bytes:
        written = self._tokenizer.convert_ids_to_tokens(token)
        if written is None:  # models have more rows in their head than their tokenizers have tokens
            return b""
        if token not in self._special:
            if self._byte_level and all(sign in _bytes_of_signs() for sign in written):
                return bytes(_bytes_of_signs()[sign] for sign in written)
            if one := _BYTE.fullmatch(written):
                return bytes([int(one[1], 16)])
            if written.startswith("\u2581"):  # SentencePiece's sign for a space, which decoding drops at the start
                return written.replace("\u2581", " ").encode()
        text: str = self._tokenizer.decode([token], skip_special_tokens=False)
        return text.encode(errors="replace")


@cache
def _bytes_of_signs() -> dict[str, int]:
    """Byte-level tokenizers write every byte as a printable sign: as itself where it is one, else from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
