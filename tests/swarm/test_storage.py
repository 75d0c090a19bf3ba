"""What one peer may have kept in the directory, and how often it may ask: past that it is refused, others are not."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
import uvloop
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord
from hivemind.utils import MSGPackSerializer, get_dht_time

from lilliput.swarm import callers, directory, storage
from lilliput.swarm.identity import Identity
from lilliput.swarm.node import Node
from lilliput.swarm.records import ServerRecord
from lilliput.swarm.signatures import Signatures, signed_subkey

MODELS = [f"model-{number}" for number in range(storage.RECORDS_PER_PEER + 4)]


def record(owner: str, model: str) -> ServerRecord:
    return ServerRecord(peer_id=owner, model=model, model_blocks=30, start=0, end=12)


async def bring(node: Node, to: Node, owner: Identity | None, models: Sequence[str], padding: int = 0) -> list[bool]:
    """Ask a peer to keep records that `owner` signs (None: the node itself); whether it took them."""
    signatures = node.signatures if owner is None else Signatures(owner)
    peer_id = str(node.peer_id if owner is None else owner.peer_id)
    keys = [DHTID.generate(f"lilliput:1:{model}") for model in models]
    until = get_dht_time() + 30
    packed = MSGPackSerializer.dumps(signed_subkey(peer_id))
    bodies = [MSGPackSerializer.dumps(record(peer_id, model).to_bytes() + bytes(padding)) for model in models]
    values = [
        signatures.sign_value(DHTRecord(key.to_bytes(), packed, body, until))
        for key, body in zip(keys, bodies, strict=True)
    ]
    subkeys = [signed_subkey(peer_id)] * len(keys)
    taken = await node.dht.protocol.call_store(to.peer_id, keys, values, until, subkeys=subkeys)
    return taken or []


async def hint(node: Node, to: Node, names: Sequence[str], value: object = 7, seconds: float = 30) -> list[bool]:
    key, body = DHTID.generate("lilliput:1"), MSGPackSerializer.dumps(value)
    taken = await node.dht.protocol.call_store(
        to.peer_id, [key] * len(names), [body] * len(names), get_dht_time() + seconds, subkeys=list(names)
    )
    return taken or []


def test_a_greedy_peer_has_a_few_records_and_hints_and_others_notice_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        first = await Node.start()
        addresses = await first.addresses()
        greedy, *others = await asyncio.gather(*(Node.start(addresses, client_mode=True) for _ in range(3)))
        try:
            most = storage.RECORDS_PER_PEER
            assert await bring(greedy, first, None, MODELS) == [True] * most + [False] * (len(MODELS) - most)
            # in the names of peers that there are not, or with more than a record
            assert await bring(greedy, first, Identity.generate(), MODELS[:2]) == [False] * 2
            assert await bring(greedy, first, None, MODELS[:1], padding=1 << 15) == [False]

            names = [f"name {number}" for number in range(storage.HINTS_PER_PEER + 50)]
            assert sum(await hint(greedy, first, names)) == storage.HINTS_PER_PEER
            assert await hint(others[0], first, ["long"], "x" * storage.HINT_BYTES) == [False]
            assert await hint(others[0], first, ["for ever"], seconds=1e6) == [False]

            for other in others:
                for model in MODELS[:3]:
                    assert await directory.announce(other, record(str(other.peer_id), model))
                assert await hint(other, first, [f"name of {other.peer_id}"]) == [True]
            for model in MODELS[:3]:
                found = await directory.find(others[0], model)
                assert {r.peer_id for r in found} == {str(node.peer_id) for node in (greedy, *others)}
            # what it has, it may renew, and no more
            mine = str(greedy.peer_id)
            assert await directory.announce(greedy, record(mine, MODELS[0]), directory.MOST_LEASE_SECONDS)
            assert not await directory.announce(greedy, record(mine, MODELS[-1]), directory.MOST_LEASE_SECONDS)
            # until something ends
            monkeypatch.setattr(storage, "HINTS_PER_PEER", 6)
            assert await hint(others[1], first, ["a", "b", "c"], seconds=0.5) == [True, True, False]
            while not (await hint(others[1], first, ["d"]))[0]:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        finally:
            for node in (greedy, *others, first):
                await node.stop()

    uvloop.run(main())


def test_who_calls_too_often_is_told_to_wait_and_others_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callers, "CALLS_PER_SECOND", 1e-3)
    monkeypatch.setattr(callers, "CALLS_AT_ONCE", 30.0)

    async def main() -> None:
        first = await Node.start()
        addresses = await first.addresses()
        greedy, other = await Node.start(addresses, client_mode=True), await Node.start(addresses, client_mode=True)
        try:
            answers = [await greedy.dht.protocol.call_ping(first.peer_id) for _ in range(50)]
            assert None not in answers[:20]
            assert set(answers[-10:]) == {None}
            assert await directory.announce(other, record(str(other.peer_id), "some"))
            assert [r.peer_id for r in await directory.find(other, "some")] == [str(other.peer_id)]
        finally:
            for node in (greedy, other, first):
                await node.stop()

    uvloop.run(main())
