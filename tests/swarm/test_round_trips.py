"""Pings between real peers over an emulated network."""

from __future__ import annotations

import asyncio
import time

import pytest
import uvloop

from lilliput.cli.bench.network import Network
from lilliput.errors import BadRequest
from lilliput.swarm import round_trips
from lilliput.swarm.node import Node
from lilliput.swarm.round_trips import RoundTrips, answer_pings
from lilliput.wire import lilliput_pb2 as pb
from lilliput.wire.protocol import PING

NOBODY = "12D3KooWS27M6oPeJ9xnpepDXPmQ6x12nLW9HW5h8G5tajeTcZnP"


def run_over_links(test: object, *delays: float) -> None:
    """A peer behind each link, a client, and `test(network, links, servers, client)`."""

    async def main() -> None:
        with Network() as network:
            links = [network.link(delay=delay) for delay in delays]
            peers: list[Node] = []
            try:
                for link in links:
                    known = await peers[0].addresses() if peers else []
                    hosts = [f"/ip4/127.0.0.1/tcp/{link.target}"]
                    peers.append(await Node.start(known, host_maddrs=hosts, announce_maddrs=[link.address]))
                    await peers[-1].serve(PING, answer_pings)
                client = await Node.start(await peers[0].addresses(), client_mode=True)
                try:
                    await test(network, links, peers, client)  # type: ignore[operator]
                finally:
                    await client.stop()
            finally:
                for peer in reversed(peers):
                    await peer.stop()

    uvloop.run(main())


def test_a_client_and_servers_measure_the_ways_over_which_their_messages_go() -> None:
    async def test(network: Network, links: list, peers: list[Node], client: Node) -> None:
        near, far = (str(peer.peer_id) for peer in peers)
        ways = RoundTrips(client)
        await ways.renew([near, far], within=5)
        # clocks are coarse and machines busy: what is way off would be half or double
        assert 0.019 < ways.known[near] < 0.07
        assert 0.079 < ways.known[far] < 0.3
        assert list(ways.fastest([far, near, NOBODY], 16)) == [near, far]
        assert list(ways.fastest([far, near], 1)) == [near]
        for one, other in ((0, 1), (1, 0)):  # whoever of the two made the connection
            between = RoundTrips(peers[one])
            await between.renew([str(peers[other].peer_id)], within=5)
            assert 0.098 < between.known[str(peers[other].peer_id)] < 0.3
        assert all(link.accepted for link in links)

    run_over_links(test, 0.01, 0.04)


def test_nobody_waits_long_for_a_silent_peer_nor_again_for_one_that_is_known() -> None:
    async def test(network: Network, links: list, peers: list[Node], client: Node) -> None:
        name = str(peers[0].peer_id)
        ways = RoundTrips(client)
        network.stall(links[0])
        begun = time.monotonic()
        await ways.renew([name], within=0.2)
        assert time.monotonic() - begun < 4
        assert ways.known == {}
        network.mend(links[0])
        await ways.renew([name], within=5)
        assert ways.known[name]
        begun = time.monotonic()
        await ways.renew([name], within=5)  # it is fresh
        ways._due[name] = 0.0
        network.stall(links[0])
        await ways.renew([name], within=5)  # it is not, but there is a figure until there is another
        assert time.monotonic() - begun < 4
        ways.close()

    run_over_links(test, 0.0)


def test_peers_that_do_not_answer_are_known_not_to_and_few_are_pinged_at_a_time() -> None:
    async def test(network: Network, links: list, peers: list[Node], client: Node) -> None:
        ways = RoundTrips(client)
        me = str(client.peer_id)
        await ways.renew([NOBODY, me], within=round_trips.PING_SECONDS + 1)
        assert ways.known == {NOBODY: None}
        assert ways.fastest([NOBODY], 16) == {}
        many = [f"{NOBODY[:-3]}{number}" for number in range(111, 212) if "0" not in str(number)]
        await ways.renew(many)
        assert len(ways._measuring) == round_trips.MOST_PEERS
        ways.close()

    run_over_links(test, 0.0)


def test_a_stream_of_pings_takes_nothing_else_and_not_for_ever() -> None:
    async def test(network: Network, links: list, peers: list[Node], client: Node) -> None:
        channel = await client.open(peers[0].peer_id, PING)
        await channel.send(pb.Message(close=pb.Close()))
        with pytest.raises(BadRequest, match="'close' message"):
            await channel.expect("pong")
        assert await asyncio.wait_for(channel.receive(), 2) is None
        channel = await client.open(peers[0].peer_id, PING)
        for number in range(round_trips._MOST_PINGS):
            await channel.send(pb.Message(ping=pb.Ping(id=number)))
            assert (await channel.expect("pong")).body.id == number  # type: ignore[attr-defined]
        assert await asyncio.wait_for(channel.receive(), 2) is None

    run_over_links(test, 0.0)
