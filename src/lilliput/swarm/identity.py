"""Who a peer is: its key, the peer id that follows from it, and what it signs.

Keys and peer ids are libp2p's own, so the id that a p2p daemon proves with every connection is the id under which the
peer's records are signed. New keys are Ed25519; RSA keys, as hivemind makes them, are understood.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from functools import cached_property
from typing import IO, cast

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ed25519, padding, rsa
from hivemind.p2p import PeerID
from hivemind.proto import crypto_pb2

from lilliput.errors import BadRequest

#: a public key of at most so many bytes is its own peer id, a longer one's is its hash (libp2p's rule)
_INLINE_BYTES = 42
#: larger keys only take others' time
_MOST_KEY_BYTES = 600
#: of a file with a key; some that are no such file never end
_MOST_FILE_BYTES = 1 << 16
_SEED_BYTES = 32
_RAW, _DER = serialization.Encoding.Raw, serialization.Encoding.DER


class Identity:
    """A peer's private key. Make one with `generate`, or read one with `from_bytes`."""

    def __init__(self, key: ed25519.Ed25519PrivateKey | rsa.RSAPrivateKey) -> None:
        self._key = key

    @classmethod
    def generate(cls) -> Identity:
        return cls(ed25519.Ed25519PrivateKey.generate())

    @classmethod
    def from_bytes(cls, data: bytes) -> Identity:
        """From the contents of an identity file. Raises `ValueError` if it is none."""
        try:
            private = crypto_pb2.PrivateKey.FromString(data)
            if private.key_type == crypto_pb2.KeyType.Ed25519:
                return cls(ed25519.Ed25519PrivateKey.from_private_bytes(private.data[:_SEED_BYTES]))
            key = serialization.load_der_private_key(private.data, password=None)
        except Exception as e:  # libraries say all kinds of things to bytes that are no key
            raise ValueError("not a private key") from e
        if not isinstance(key, rsa.RSAPrivateKey):
            raise ValueError("neither an Ed25519 nor an RSA key")
        return cls(key)

    def to_bytes(self) -> bytes:
        """As p2p daemons read it from a file."""
        none = serialization.NoEncryption()
        if isinstance(self._key, rsa.RSAPrivateKey):
            data = self._key.private_bytes(_DER, serialization.PrivateFormat.TraditionalOpenSSL, none)
            return bytes(crypto_pb2.PrivateKey(key_type=crypto_pb2.KeyType.RSA, data=data).SerializeToString())
        seed = self._key.private_bytes(_RAW, serialization.PrivateFormat.Raw, none)
        data = seed + self._key.public_key().public_bytes(_RAW, serialization.PublicFormat.Raw)
        return bytes(crypto_pb2.PrivateKey(key_type=crypto_pb2.KeyType.Ed25519, data=data).SerializeToString())

    def write(self, path: str | os.PathLike[str]) -> None:
        """Make an identity file, which only its owner may read. Raises `OSError` if there is one already."""
        with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o400), "wb") as file:
            file.write(self.to_bytes())

    @cached_property
    def public_key(self) -> bytes:
        """As libp2p writes it."""
        if isinstance(self._key, rsa.RSAPrivateKey):
            data = self._key.public_key().public_bytes(_DER, serialization.PublicFormat.SubjectPublicKeyInfo)
            return bytes(crypto_pb2.PublicKey(key_type=crypto_pb2.KeyType.RSA, data=data).SerializeToString())
        data = self._key.public_key().public_bytes(_RAW, serialization.PublicFormat.Raw)
        return bytes(crypto_pb2.PublicKey(key_type=crypto_pb2.KeyType.Ed25519, data=data).SerializeToString())

    @cached_property
    def peer_id(self) -> PeerID:
        return peer_id_of(self.public_key)

    def sign(self, data: bytes) -> bytes:
        if isinstance(self._key, rsa.RSAPrivateKey):
            return self._key.sign(data, padding.PKCS1v15(), hashes.SHA256())
        return self._key.sign(data)


def peer_id_of(public_key: bytes) -> PeerID:
    """The id of the peer that has this key."""
    if len(public_key) <= _INLINE_BYTES:
        return PeerID(bytes((0x00, len(public_key))) + public_key)
    return PeerID(bytes((0x12, hashlib.sha256().digest_size)) + hashlib.sha256(public_key).digest())


def is_signed(data: bytes, signature: bytes, public_key: bytes) -> bool:
    """Whether the owner of a public key has signed this. False for anything that is no key or no signature."""
    if len(public_key) > _MOST_KEY_BYTES:
        return False
    try:
        public = crypto_pb2.PublicKey.FromString(public_key)
        if public.key_type == crypto_pb2.KeyType.Ed25519:
            ed25519.Ed25519PublicKey.from_public_bytes(public.data).verify(signature, data)
        else:
            key = serialization.load_der_public_key(public.data)
            if not isinstance(key, rsa.RSAPublicKey):
                return False
            key.verify(signature, data, padding.PKCS1v15(), hashes.SHA256())
    except Exception:  # an invalid signature, or whatever libraries say to bytes that are no key
        return False
    return True


def take_identity(path: str | os.PathLike[str] | None) -> tuple[Identity, IO[bytes]]:
    """An identity, and the file in which the daemon finds it.

    A file that is given is taken for this process alone: two peers with one id break each other's connections.
    """
    if path is None:
        identity, passing = Identity.generate(), tempfile.NamedTemporaryFile(prefix="lilliput-key-")  # noqa: SIM115
        passing.write(identity.to_bytes())
        passing.flush()
        return identity, cast(IO[bytes], passing)
    name = os.path.expanduser(path)
    try:
        if not os.path.exists(name):
            Identity.generate().write(name)
        file = open(name, "rb")  # noqa: SIM115 (held as long as the node lives)
    except OSError as e:
        raise BadRequest(f"cannot use the identity file {name}: {e.strerror or e}") from e
    try:
        identity = Identity.from_bytes(file.read(_MOST_FILE_BYTES))
    except (OSError, ValueError) as e:
        file.close()
        raise BadRequest(f"{name} is not an identity file") from e
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        file.close()
        raise BadRequest(f"the identity {name} is in use by another process") from e
    return identity, file
