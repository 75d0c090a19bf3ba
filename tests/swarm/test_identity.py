"""Keys, peer ids and signatures as libp2p has them."""

from __future__ import annotations

from pathlib import Path

import pytest
import uvloop
from hivemind.p2p import P2P, PeerID

from lilliput.errors import BadRequest
from lilliput.swarm.identity import Identity, is_signed, peer_id_of
from lilliput.swarm.node import Node


@pytest.fixture(params=["Ed25519", "RSA"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """An identity file of either kind; hivemind makes RSA keys."""
    path = tmp_path / "key"
    if request.param == "RSA":
        P2P.generate_identity(str(path))
        assert PeerID.from_identity(path.read_bytes()) == Identity.from_bytes(path.read_bytes()).peer_id
    else:
        Identity.generate().write(path)
    return path


def test_the_daemon_has_the_peer_id_that_follows_from_the_key(path: Path) -> None:
    identity = Identity.from_bytes(path.read_bytes())

    async def main() -> None:
        node = await Node.start(identity_path=path)
        await node.stop()
        assert node.peer_id == identity.peer_id

    uvloop.run(main())


def test_a_key_survives_its_file_which_only_its_owner_reads(path: Path, tmp_path: Path) -> None:
    identity = Identity.from_bytes(path.read_bytes())
    identity.write(tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == path.read_bytes()
    assert (tmp_path / "copy").stat().st_mode & 0o777 == 0o400
    with pytest.raises(FileExistsError):
        identity.write(tmp_path / "copy")


def test_a_signature_is_of_one_text_by_one_key(path: Path) -> None:
    identity, other = Identity.from_bytes(path.read_bytes()), Identity.generate()
    signature = identity.sign(b"text")
    assert is_signed(b"text", signature, identity.public_key)
    assert peer_id_of(identity.public_key) == identity.peer_id != other.peer_id
    assert not is_signed(b"texT", signature, identity.public_key)
    assert not is_signed(b"text", signature, other.public_key)
    assert not is_signed(b"text", signature[:-1], identity.public_key)
    for garbage in (b"", b"\x08\x01", b"\xff" * 36, b"\x08\x01\x12\x20" + bytes(31), bytes(5000)):
        assert not is_signed(b"text", signature, garbage)
        with pytest.raises(ValueError, match="key"):
            Identity.from_bytes(garbage)


def test_a_file_that_never_ends_is_no_identity() -> None:
    with pytest.raises(BadRequest, match="/dev/zero is not an identity file"):
        uvloop.run(Node.start(identity_path="/dev/zero"))


def test_a_file_that_is_no_identity_is_named(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"secret")
    with pytest.raises(BadRequest, match="key is not an identity file"):
        uvloop.run(Node.start(identity_path=tmp_path / "key"))
