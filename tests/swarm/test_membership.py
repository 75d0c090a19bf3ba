"""A private swarm's key: what it proves, to whom, and in which file it lies."""

from __future__ import annotations

import asyncio
import logging
import stat
from pathlib import Path

import pytest
import uvloop
from hivemind.dht import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import P2P
from hivemind.utils import MSGPackSerializer, get_dht_time

from lilliput.errors import BadRequest, LilliputError, Unauthorized, Unreachable
from lilliput.swarm import directory, swarm_key
from lilliput.swarm.identity import Identity
from lilliput.swarm.node import Node
from lilliput.swarm.peer_calls import serve_peers
from lilliput.swarm.records import ServerRecord
from lilliput.swarm.round_trips import ping
from lilliput.swarm.sealed import SealedP2P
from lilliput.swarm.signatures import Signatures
from lilliput.swarm.swarm_key import SwarmKey
from lilliput.wire import lilliput_pb2 as pb
from lilliput.wire.protocol import PING

KEY = SwarmKey.generate()
ME, PEER, OTHER = (Identity.generate().peer_id for _ in range(3))


def test_a_token_is_for_one_peer_from_one_peer_for_one_call() -> None:
    token = KEY.token("call", ME, PEER)
    KEY.check_token(token, "call", ME, PEER)
    for call, asker, asked in (("call", OTHER, PEER), ("call", ME, OTHER), ("another", ME, PEER), ("call", PEER, ME)):
        with pytest.raises(Unauthorized, match="not this private swarm's"):
            KEY.check_token(token, call, asker, asked)
    for wrong in (token[:-1], token[:8] + bytes(16) + token[24:], b"\0" * len(token), token + b"x"):
        with pytest.raises(Unauthorized):
            KEY.check_token(wrong, "call", ME, PEER)
    with pytest.raises(Unauthorized, match="--swarm-key"):
        KEY.check_token(b"", "call", ME, PEER)
    with pytest.raises(Unauthorized):
        SwarmKey.generate().check_token(token, "call", ME, PEER)


def test_a_proof_answers_one_token_and_a_token_is_no_proof() -> None:
    token = KEY.token("call", ME, PEER)
    KEY.check_proof(KEY.proof(token, "call", ME, PEER), token, "call", ME, PEER)
    for proof in (KEY.proof(KEY.token("call", ME, PEER), "call", ME, PEER), token, token[-32:], b""):
        with pytest.raises(Unreachable, match="cannot prove"):
            KEY.check_proof(proof, token, "call", ME, PEER)


@pytest.mark.parametrize(("late", "side"), [(120, "behind"), (-120, "ahead of")])
def test_an_old_token_names_the_clock(monkeypatch: pytest.MonkeyPatch, late: float, side: str) -> None:
    token = KEY.token("call", ME, PEER)
    now = swarm_key.time.time()
    monkeypatch.setattr(swarm_key.time, "time", lambda: now + late)
    with pytest.raises(Unauthorized, match=f"120 s {side} ours"):
        KEY.check_token(token, "call", ME, PEER)


def test_a_key_file_is_its_owners_alone_and_never_written_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "swarm.key"
    KEY.write(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert len(file.read_text().strip()) == 44
    assert SwarmKey.read(file).name == KEY.name
    assert not caplog.records
    with pytest.raises(BadRequest, match="already"):
        SwarmKey.generate().write(file)
    assert SwarmKey.read(file).name == KEY.name
    file.chmod(0o644)
    with caplog.at_level(logging.WARNING):
        SwarmKey.read(file)
    assert "chmod 600" in caplog.text
    file.chmod(0o600)
    file.write_text("nonsense\n")
    with pytest.raises(BadRequest, match="base64"):
        SwarmKey.read(file)
    with pytest.raises(BadRequest, match="cannot read"):
        SwarmKey.read(tmp_path / "missing")
    assert KEY.name in repr(KEY)
    assert SwarmKey.generate().name != KEY.name


def record(node: Node) -> ServerRecord:
    return ServerRecord(peer_id=str(node.peer_id), model="m", model_blocks=4, start=0, end=4)


def test_members_find_each_other_and_strangers_find_nothing(tmp_path: Path) -> None:
    """Over real daemons: members look up, announce and ping; who has no key, or another one, does none of it."""

    async def main() -> None:
        first = await Node.start(swarm_key=KEY)
        started = [first]
        try:
            await serve_peers(first)
            addresses = await first.addresses()
            server = await Node.start(addresses, swarm_key=KEY)
            started.append(server)
            assert await directory.announce(server, record(server), directory.MOST_LEASE_SECONDS)
            assert [r.peer_id for r in await directory.find(first, "m")] == [str(server.peer_id)]
            assert await ping(server, str(first.peer_id)) > 0
            for key in (None, SwarmKey.generate()):
                with pytest.raises(Unauthorized, match="--swarm-key"):
                    await Node.start(addresses, client_mode=True, swarm_key=key)
                # a peer that joined some other swarm and then dials ours by its peer id
                other = await knocking(addresses, key, tmp_path / str(key))
                started.append(other)
                with pytest.raises((Unauthorized, Unreachable)):
                    await ping(other, str(first.peer_id))
                assert await other.dht.protocol.call_ping(first.peer_id) is None
                assert not await store_at(other, first, record(other))
                assert [r.peer_id for r in await directory.find(first, "m")] == [str(server.peer_id)]
        finally:
            for node in reversed(started):
                await node.stop()

    uvloop.run(main())


async def knocking(addresses: list[str], key: SwarmKey | None, file: Path) -> Node:
    """A peer that is connected to another as far as libp2p goes, and has asked for nothing yet."""
    identity = Identity.generate()
    identity.write(file)
    p2p = await (SealedP2P if key else P2P).create(
        initial_peers=addresses, identity_path=str(file), check_if_identity_free=False, nat_port_map=False
    )
    if key:
        p2p.key = key
    signatures = Signatures(identity)
    dht = await DHTNode.create(p2p=p2p, record_validator=signatures)
    return Node(p2p, dht, signatures, file.open("rb"), key)


async def store_at(node: Node, target: Node, forged: ServerRecord) -> bool:
    """Ask one node of the DHT to keep a record, correctly signed, as a peer that knows the protocol would."""
    key, subkey, end = DHTID.generate("lilliput:1:m"), f"signed:{node.peer_id}", get_dht_time() + 10
    value = MSGPackSerializer.dumps(forged.to_bytes())
    signed = node.signatures.sign_value(DHTRecord(key.to_bytes(), MSGPackSerializer.dumps(subkey), value, end))
    stored = await node.dht.protocol.call_store(target.peer_id, [key], [signed], end, subkeys=[subkey])
    return bool(stored and stored[0])


def test_the_same_record_is_kept_from_a_member() -> None:
    """Or the test above would show nothing."""

    async def main() -> None:
        first = await Node.start(swarm_key=KEY)
        other = await Node.start(await first.addresses(), swarm_key=KEY)
        try:
            assert await store_at(other, first, record(other))
        finally:
            await other.stop()
            await first.stop()

    uvloop.run(main())


def test_nothing_is_sent_to_an_impostor(tmp_path: Path) -> None:
    """A peer without the key that says it is a server hears a token, and not one word of what the client has to say."""

    async def main() -> None:
        impostor = await Node.start()
        heard: list[str] = []
        ended = asyncio.Event()

        async def listen(channel: object, peer: object) -> None:
            received = await channel.receive()  # type: ignore[attr-defined]
            heard.append(received.kind)
            channel.post(pb.Message(welcome=pb.Welcome(proof=received.body.token)))  # type: ignore[attr-defined]
            heard.append(str(await channel.receive()))  # type: ignore[attr-defined]
            ended.set()

        await impostor.serve(PING, listen)
        member = await knocking(await impostor.addresses(), KEY, tmp_path / "member")
        try:
            with pytest.raises(Unreachable, match="cannot prove"):
                await ping(member, str(impostor.peer_id))
            async with asyncio.timeout(30):
                await ended.wait()
            assert heard == ["hello", "None"]
            with pytest.raises(LilliputError, match="cannot prove"):
                await Node.start(await impostor.addresses(), swarm_key=KEY, client_mode=True)
        finally:
            await member.stop()
            await impostor.stop()

    uvloop.run(main())
