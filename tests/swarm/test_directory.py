"""Announcing, finding and withdrawing over real peers."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
import uvloop
from hivemind.moe.server.dht_handler import _get_experts
from hivemind.utils import get_dht_time

from lilliput.errors import BadRequest
from lilliput.swarm import directory
from lilliput.swarm.node import Node
from lilliput.swarm.records import ServerRecord


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
        garbage = {"a": b"\xff", 7: good.to_bytes(), "c": {"x": 1}, str(first.peer_id): good.to_bytes()}
        for later, (subkey, value) in enumerate(garbage.items()):
            await first.dht.store(key, value, until + later, subkey=subkey)
        await first.dht.store("lilliput:1", "not a number", get_dht_time() + 5, subkey=good.model)
        await first.dht.store("lilliput:1", 3, until + 1, subkey=5)
        # bytes that are no value at all, as a hostile peer would store them
        nearest = await first.dht.find_nearest_nodes([key_id := type(first.dht.node_id).generate(key)])
        for peer in set(nearest[key_id].values()) - {first.peer_id}:
            await first.dht.protocol.call_store(peer, [key_id], [b"\xc1\xc1"], until, subkeys=["hostile"])
        await directory.announce(server, good)
        assert await asyncio.wait_for(directory.find(client, good.model), 5) == [good]
        assert await directory.models(client) == {good.model: 30}
        await first.dht.store("lilliput:1:scalar", "no dictionary", until)
        assert await directory.find(client, "scalar") == []

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
