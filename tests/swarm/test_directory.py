"""Announcing, finding and withdrawing over real peers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord
from hivemind.moe.server.dht_handler import _get_experts
from hivemind.p2p import P2P
from hivemind.utils import MSGPackSerializer, get_dht_time

from lilliput.errors import BadRequest
from lilliput.swarm import directory
from lilliput.swarm.node import Node
from lilliput.swarm.records import ServerRecord
from lilliput.swarm.signatures import signed_subkey


def run_with_three(test: Any) -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            first = await Node.start()
            addresses = await first.addresses()
            others: list[Coroutine[Any, Any, Node]] = [Node.start(addresses), Node.start(addresses, client_mode=True)]
            tasks = [group.create_task(other) for other in others]
        server, client = (task.result() for task in tasks)
        try:
            await test(first, server, client)
        finally:
            for node in (client, server, first):
                await node.stop()

    uvloop.run(main())


def record(node: Node, start: int, end: int, model: str = "some/model.v1") -> ServerRecord:
    return ServerRecord(peer_id=str(node.peer_id), model=model, model_blocks=30, start=start, end=end)


def test_servers_are_found_by_model_until_they_withdraw() -> None:
    async def test(first: Node, server: Node, client: Node) -> None:
        one, two = record(first, 10, 30), record(server, 0, 12)
        assert await directory.find(client, one.model) == []
        assert await directory.models(client) == {}
        assert await directory.announce(first, one)
        assert await directory.announce(server, two)
        for node in (first, server, client):
            assert await directory.find(node, one.model) == [two, one]
        assert await directory.find(client, "some/other") == []
        assert await directory.models(client) == {one.model: 30}
        assert await directory.withdraw(server, two)
        assert await directory.find(client, one.model) == [one]
        assert await directory.announce(server, two)
        assert await directory.find(client, one.model) == [two, one]

    run_with_three(test)


def test_a_later_announcement_replaces_the_earlier_and_a_lease_ends() -> None:
    async def test(first: Node, server: Node, client: Node) -> None:
        busy = record(server, 0, 12).model_copy(update={"sessions": 3})
        await directory.announce(server, record(server, 0, 12), lease_seconds=1.0)
        await directory.announce(server, busy, lease_seconds=0.5)
        assert await directory.find(client, busy.model) == [busy]
        await asyncio.sleep(1.2)
        assert await directory.find(client, busy.model) == []

    run_with_three(test)


def test_garbage_in_the_dht_is_passed_over() -> None:
    async def test(first: Node, server: Node, client: Node) -> None:
        good = record(server, 0, 12)
        key, until = f"lilliput:1:{good.model}", get_dht_time() + 30
        garbage = {
            "a": b"\xff",
            7: good.to_bytes(),
            "c": {"x": 1},
            str(server.peer_id): good.to_bytes(),
            signed_subkey(str(first.peer_id)): good.to_bytes(),
        }
        for later, (subkey, value) in enumerate(garbage.items()):
            await first.dht.store(key, value, until + later, subkey=subkey)
        await first.dht.store("lilliput:1", "not a number", get_dht_time() + 5, subkey=good.model)
        await first.dht.store("lilliput:1", 3, until + 1, subkey=5)
        # bytes that are no value at all, as a hostile peer would store them
        for subkey in ("hostile", signed_subkey("hostile")):
            await store_raw(first, key, b"\xc1\xc1", until, subkey)
        await directory.announce(server, good)
        assert await asyncio.wait_for(directory.find(client, good.model), 5) == [good]
        assert await directory.models(client) == {good.model: 30}
        await first.dht.store("lilliput:1:scalar", "no dictionary", until)
        assert await directory.find(client, "scalar") == []

    run_with_three(test)


async def store_raw(node: Node, key: str, value: bytes, until: float, subkey: str | None = None) -> list[bool]:
    """Store bytes at all other peers, as a hostile one would; whether they took it, and so in their caches."""
    key_id = DHTID.generate(key)
    taken = []
    nearest = await node.dht.find_nearest_nodes([key_id])
    for peer in set(nearest[key_id].values()) - {node.peer_id}:
        for in_cache in (False, True):
            done = await node.dht.protocol.call_store(
                peer, [key_id], [value], until, subkeys=[subkey] if subkey else None, in_cache=in_cache
            )
            taken += done or [False]
    return taken


@pytest.mark.parametrize("kind", ["Ed25519", "RSA"])
def test_nobody_writes_in_the_name_of_another_whatever_the_kind_of_its_key(kind: str, tmp_path: Path) -> None:
    async def main() -> None:
        if kind == "RSA":
            P2P.generate_identity(str(tmp_path / "key"))
        server = await Node.start(identity_path=tmp_path / "key")
        forger, client = await Node.start(await server.addresses()), await Node.start(await server.addresses())
        try:
            good = record(server, 0, 12)
            assert str(good.peer_id).startswith("Qm" if kind == "RSA" else "12D3")
            assert await directory.announce(server, good)
            assert await directory.find(client, good.model) == [good]
            key, subkey = f"lilliput:1:{good.model}", signed_subkey(good.peer_id)

            # another span, a goodbye: unsigned, signed with another's key, or what the server signed for less time
            assert not await directory.announce(forger, good.model_copy(update={"end": 30}))
            assert not await directory.withdraw(forger, good)
            ((until, signed),) = [
                (entry.expiration_time, entry.value)
                for node in (server, forger, client)
                if (found := node.dht.protocol.storage.get(DHTID.generate(key)))
                for entry in [found.value.get(subkey)]
                if entry
            ][:1]
            body = MSGPackSerializer.dumps(b"")
            theirs = forger.signatures.sign_value(
                DHTRecord(
                    DHTID.generate(key).to_bytes(),
                    MSGPackSerializer.dumps(signed_subkey(str(forger.peer_id))),
                    body,
                    until + 5,
                )
            )
            for value in (body, theirs, signed, signed[:-1], signed.replace(b'"end":12', b'"end":13')):
                assert not any(await store_raw(forger, key, value, until + 5, subkey))
            assert await directory.find(client, good.model) == [good]

            # the same under a key of another model
            assert not any(await store_raw(forger, "lilliput:1:other", signed, until, subkey))

            # one value in place of all subkeys, before the first record or after it; or hidden behind a cached one
            await store_raw(forger, key, MSGPackSerializer.dumps("nobody here"), until + 50)
            await store_raw(forger, key, MSGPackSerializer.dumps(1), until + 50, "nobody here")
            assert await directory.find(client, good.model) == [good]
            early = record(server, 0, 12, model="early")
            await store_raw(forger, "lilliput:1:early", MSGPackSerializer.dumps("nobody here"), until + 50)
            assert await directory.announce(server, early)
            assert await directory.find(client, "early") == [early]
            assert await directory.find(forger, "early") == [early]

            assert await directory.withdraw(server, good)
            assert await directory.find(client, good.model) == []
            assert not any(await store_raw(forger, key, signed, until, subkey))
            assert await directory.find(client, good.model) == []
        finally:
            for node in (client, forger, server):
                await node.stop()

    uvloop.run(main())


def test_a_lease_without_end_is_not_believed() -> None:
    async def test(first: Node, server: Node, client: Node) -> None:
        endless = record(server, 0, 12)
        key, subkey = f"lilliput:1:{endless.model}", signed_subkey(endless.peer_id)
        assert await directory.announce(server, endless, lease_seconds=1e6)  # cut down to what is believed
        assert await directory.find(client, endless.model) == [endless]
        await server.dht.store(key, endless.to_bytes(), get_dht_time() + 1e6, subkey=subkey)  # kept by nobody else
        assert await directory.find(client, endless.model) == []

    run_with_three(test)


def test_announcing_again_and_again() -> None:
    async def test(first: Node, server: Node, client: Node) -> None:
        for _ in range(10):
            begun = time.perf_counter()
            await directory.announce(server, record(server, 0, 12))
            assert await directory.find(client, "some/model.v1")
            print(f"{(time.perf_counter() - begun) * 1e3:.0f} ms")

    run_with_three(test)


def test_hivemind_finds_the_declared_blocks() -> None:
    async def test(first: Node, server: Node, client: Node) -> None:
        assert await directory.declare_uids(server, "tiny", (3, 5))

        class ForkedDht:  # all that hivemind's function reads of its own DHT
            num_workers = 4

        uids = ["tiny.3", "tiny.4", "tiny.5"]
        found = await _get_experts(ForkedDht(), client.dht, uids, None)
        assert [expert and (expert.uid, expert.peer_id) for expert in found] == [
            ("tiny.3", server.peer_id),
            ("tiny.4", server.peer_id),
            None,
        ]
        with pytest.raises(BadRequest, match="prefix"):
            await directory.declare_uids(server, "Llama-3.1", (0, 1))

    run_with_three(test)
