"""A private swarm's key, and what its members prove with it. Needs none of the large libraries."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import logging
import os
import secrets
import stat
import struct
import time
from pathlib import Path
from typing import TYPE_CHECKING

from lilliput.errors import BadRequest, Unauthorized, Unreachable

if TYPE_CHECKING:
    from hivemind.p2p import PeerID

logger = logging.getLogger(__name__)

KEY_BYTES = 32
#: a token's time may be so far from ours (seconds)
CLOCK_SECONDS = 60.0

_NONCE_BYTES = 16
_TIME = struct.Struct("!d")
_TOKEN_BYTES = _TIME.size + _NONCE_BYTES + hashlib.sha256().digest_size

_ASK = "ask its owner for the key file and name it with --swarm-key"


class NotAMember(Unreachable):
    """A peer cannot prove that it has the swarm's key."""

    def __init__(self, peer: PeerID) -> None:
        super().__init__(f"peer {peer} cannot prove that it has this swarm's key, so nothing is sent to it", str(peer))


class SwarmKey:
    """What the members of a private swarm share. Make one with `generate`, or `read` one from a file."""

    def __init__(self, secret: bytes) -> None:
        if len(secret) != KEY_BYTES:
            raise ValueError(f"a swarm's key has {KEY_BYTES} bytes")
        self._secret = secret

    @classmethod
    def generate(cls) -> SwarmKey:
        return cls(secrets.token_bytes(KEY_BYTES))

    @classmethod
    def read(cls, path: str | os.PathLike[str], *, warn: bool = True) -> SwarmKey:
        """From a file. Raises `BadRequest` if it is none.

        :param warn: if others than its owner may read it
        """
        file = Path(path).expanduser()
        try:
            with file.open("rb") as opened:
                mode, text = os.fstat(opened.fileno()).st_mode, opened.read(1024)
        except OSError as e:
            raise BadRequest(f"cannot read the swarm's key {file}: {e.strerror or e}") from e
        try:
            key = cls(base64.b64decode(text.strip(), validate=True))
        except (binascii.Error, ValueError) as e:
            raise BadRequest(
                f"{file} is not a swarm's key: that is {KEY_BYTES} bytes in base64, as `lilliput key` writes them"
            ) from e
        if warn and mode & (stat.S_IRWXG | stat.S_IRWXO):
            logger.warning("others on this machine may read the swarm's key: chmod 600 %s", file)
        return key

    @classmethod
    def of(cls, key: SwarmKey | str | os.PathLike[str] | None, *, warn: bool = True) -> SwarmKey | None:
        """A key, the one in a file, or none."""
        return key if key is None or isinstance(key, SwarmKey) else cls.read(key, warn=warn)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Make a key file, which only its owner may read. Raises `BadRequest` if there is a file already."""
        file = Path(path).expanduser()
        try:
            with open(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as opened:
                opened.write(base64.b64encode(self._secret) + b"\n")
        except FileExistsError as e:
            raise BadRequest(f"there is a file {file} already; a key that is written over is lost") from e
        except OSError as e:
            raise BadRequest(f"cannot write {file}: {e.strerror or e}") from e

    @property
    def name(self) -> str:
        """Tells keys apart and gives nothing away: members compare it."""
        return hashlib.sha256(b"the name of a lilliput swarm's key" + self._secret).hexdigest()[:16]

    def __repr__(self) -> str:
        return f"SwarmKey({self.name})"

    # ---- what proves it ----

    def token(self, call: str, asker: PeerID, asked: PeerID) -> bytes:
        """Proves to `asked`, and to nobody else, that `asker` is a member."""
        head = _TIME.pack(time.time()) + secrets.token_bytes(_NONCE_BYTES)
        return head + self._mac(b"token", call, asker, asked, head)

    def check_token(self, token: bytes, call: str, asker: PeerID, asked: PeerID) -> None:
        """Raises `Unauthorized`, saying what to do, unless this is such a token, made lately."""
        if not token:
            raise Unauthorized(f"this is a private swarm, and you have shown no key; {_ASK}")
        head, mac = token[: _TIME.size + _NONCE_BYTES], token[_TIME.size + _NONCE_BYTES :]
        if len(token) != _TOKEN_BYTES or not hmac.compare_digest(mac, self._mac(b"token", call, asker, asked, head)):
            raise Unauthorized(f"your key is not this private swarm's; {_ASK}")
        late = time.time() - _TIME.unpack(head[: _TIME.size])[0]
        if not abs(late) <= CLOCK_SECONDS:
            side = "behind" if late > 0 else "ahead of"
            raise Unauthorized(
                f"your clock is {abs(late):.0f} s {side} ours, and keys are taken within {CLOCK_SECONDS:.0f} s: "
                "set the clocks (timedatectl set-ntp true)"
            )

    def proof(self, token: bytes, call: str, asker: PeerID, asked: PeerID) -> bytes:
        """Proves to the one who sent this token that `asked` is a member, too."""
        return self._mac(b"proof", call, asker, asked, token)

    def check_proof(self, proof: bytes, token: bytes, call: str, asker: PeerID, asked: PeerID) -> None:
        """Raises `Unreachable` unless it is one: that peer is not one of us, whatever it says."""
        if not hmac.compare_digest(proof, self.proof(token, call, asker, asked)):
            raise NotAMember(asked)

    def _mac(self, kind: bytes, call: str, asker: PeerID, asked: PeerID, data: bytes) -> bytes:
        parts = (b"lilliput 1", kind, call.encode(), asker.to_bytes(), asked.to_bytes(), data)
        return hmac.digest(self._secret, b"".join(len(part).to_bytes(4, "big") + part for part in parts), "sha256")
