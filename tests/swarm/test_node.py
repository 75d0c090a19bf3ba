"""Peers as real daemons on loopback: streams, failures, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop

from lilliput.errors import BadRequest, LilliputError, Unreachable
from lilliput.swarm.node import Node
from lilliput.swarm.sockets import remove_stale_sockets
from lilliput.wire import lilliput_pb2 as pb
from lilliput.wire.channel import Channel

NOBODY = "12D3KooWS27M6oPeJ9xnpepDXPmQ6x12nLW9HW5h8G5tajeTcZnP"

SERVER = """
import asyncio, sys
import uvloop
from lilliput.swarm.node import Node

async def main():
    node = await Node.start()
    async def wait(channel, peer):
        await channel.receive()
    await node.serve("wait", wait)
    print((await node.addresses())[0], flush=True)
    await asyncio.sleep(1000)

uvloop.run(main())
"""


@asynccontextmanager
async def nodes(count: int, **options: Any) -> AsyncIterator[list[Node]]:
    started: list[Node] = []
    try:
        for index in range(count):
            peers = await started[0].addresses() if index else []
            started.append(await Node.start(peers, **(options if index else {})))
        yield started
    finally:
        for node in reversed(started):
            await node.stop()


def run(main: Coroutine[Any, Any, None]) -> None:
    uvloop.run(main)


def socket_files(process: psutil.Process) -> set[Path]:
    """Those of a process's p2p daemons: other programs have theirs in the same folder."""
    lines = (" ".join(child.cmdline()) for child in process.children())
    daemons = {path for line in lines for path in re.findall(r"/tmp/hivemind-\S+?\.sock", line)}
    return {Path(end) for path in daemons for end in (path, path.replace("p2pd", "p2pclient"))}


def living_children() -> set[int]:
    return {p.pid for p in psutil.Process().children() if p.status() != psutil.STATUS_ZOMBIE}


def wait_until(condition: Any, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


async def echo(channel: Channel, peer: object) -> None:
    while (received := await channel.receive()) is not None:
        await channel.send(pb.Message(pong=pb.Pong(id=received.body.id)))  # type: ignore[attr-defined]


@pytest.mark.parametrize("client_mode", [False, True])
def test_two_peers_talk_over_a_stream_and_know_each_other(client_mode: bool) -> None:
    async def main() -> None:
        async with nodes(2, client_mode=client_mode) as (server, client):
            seen = []

            async def callback(channel: Channel, peer: object) -> None:
                seen.append(peer)
                await echo(channel, peer)

            await server.serve("echo", callback)
            channel = await client.open(str(server.peer_id), "echo")
            for number in range(1, 4):
                await channel.send(pb.Message(ping=pb.Ping(id=number)))
                assert (await channel.expect("pong")).body.id == number  # type: ignore[attr-defined]
            assert seen == [client.peer_id]
            channel.close()
            assert bool(await client.addresses()) != client_mode

    run(main())


def test_a_callback_that_fails_closes_its_stream_and_no_other() -> None:
    async def main() -> None:
        async with nodes(2) as (server, client):

            async def fail(channel: Channel, peer: object) -> None:
                raise ZeroDivisionError

            await server.serve("fail", fail)
            await server.serve("echo", echo)
            good = await client.open(server.peer_id, "echo")
            bad = await client.open(server.peer_id, "fail")
            assert await asyncio.wait_for(bad.receive(), 2) is None
            await good.send(pb.Message(ping=pb.Ping(id=1)))
            await good.expect("pong")

    run(main())


def test_a_refusal_is_heard_however_busy_the_daemon_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lilliput.wire.channel._HEAR_OUT_SECONDS", 60.0)

    async def main() -> None:
        others = living_children()
        async with nodes(1) as started:
            (daemon,) = living_children() - others
            started.append(await Node.start(await started[0].addresses(), client_mode=True))
            server, client = started
            refused = asyncio.Event()

            async def refuse(channel: Channel, peer: object) -> None:
                await channel.receive()
                os.kill(daemon, signal.SIGSTOP)
                refused.set()
                raise BadRequest("no")

            await server.serve("refuse", refuse)
            for _ in range(4):
                channel = await client.open(server.peer_id, "refuse")
                await channel.send(pb.Message(ping=pb.Ping(id=1)))
                await refused.wait()
                refused.clear()
                await channel.send(pb.Message(ping=pb.Ping(id=2)))  # it would find a stream that is closed
                await asyncio.sleep(0.3)
                os.kill(daemon, signal.SIGCONT)
                with pytest.raises(BadRequest, match="no"):
                    await channel.expect("pong")

    run(main())


def test_peers_and_handlers_that_do_not_exist_are_unreachable_by_name() -> None:
    async def main() -> None:
        async with nodes(2) as (server, client):
            for peer, handler in ((NOBODY, "echo"), (str(server.peer_id), "nonsense")):
                with pytest.raises(Unreachable, match=peer) as error:
                    await client.open(peer, handler, within=5)
                assert error.value.peer == peer

    run(main())


def test_stopping_ends_the_streams_and_leaves_no_daemon_and_no_file() -> None:
    files: set[Path] = set()
    others = socket_files(psutil.Process())

    async def main() -> None:
        async with nodes(2) as (server, client):
            files.update(socket_files(psutil.Process()) - others)
            await server.serve("echo", echo)
            channel = await client.open(server.peer_id, "echo")
            await channel.send(pb.Message(ping=pb.Ping(id=1)))
            await channel.expect("pong")
            await server.stop()
            await server.stop()
            assert await asyncio.wait_for(channel.receive(), 1) is None

    children = living_children()
    run(main())
    assert files
    assert not [file for file in files if file.exists()]
    assert living_children() <= children


def test_a_killed_peer_is_noticed_within_a_second_and_its_daemon_and_files_are_gone() -> None:
    async def main() -> None:
        with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True) as process:  # noqa: ASYNC220
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            (daemon,) = psutil.Process(process.pid).children()
            files.update(socket_files(psutil.Process(process.pid)))
            client = await Node.start([address])
            try:
                channel = await client.open(address.rsplit("/", 1)[-1], "wait")
                process.send_signal(signal.SIGKILL)
                killed = time.monotonic()
                assert await asyncio.wait_for(channel.receive(), 5) is None
                assert time.monotonic() - killed < 5
                process.wait()
                wait_until(lambda: not daemon.is_running() or daemon.status() == psutil.STATUS_ZOMBIE, 2)
            finally:
                await client.stop()

    files: set[Path] = set()
    run(main())
    remove_stale_sockets()
    assert files
    assert not [file for file in files if file.exists()]


def test_only_sockets_that_nobody_listens_on_are_removed() -> None:
    stale = Path(tempfile.mkstemp(prefix="hivemind-p2pclient-", suffix=".sock", dir="/tmp")[1])
    live = stale.with_name(stale.name.replace("client", "d"))
    stale.unlink()
    with socket.socket(socket.AF_UNIX) as dead, socket.socket(socket.AF_UNIX) as listening:
        dead.bind(str(stale))
        listening.bind(str(live))
        listening.listen()
        try:
            dead.close()
            remove_stale_sockets()
            assert not stale.exists()
            assert live.exists()
        finally:
            live.unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"initial_peers": ["nonsense"]}, BadRequest, "nonsense"),
        ({"initial_peers": ["/ip4/127.0.0.1/tcp/31337"]}, BadRequest, "/p2p/"),
        ({"initial_peers": [f"/ip4/127.0.0.1/tcp/1/p2p/{NOBODY}"]}, Unreachable, "none of the initial peers"),
        ({"host_maddrs": ["/ip4/127.0.0.1/tcp/70000"]}, BadRequest, "70000"),
        ({"host_maddrs": ["/ip4/203.0.113.9/tcp/0"]}, LilliputError, "cannot assign"),
        ({"announce_maddrs": ["/ip4/127.0.0.1/tcp/0"]}, BadRequest, "real port"),
        ({"identity_path": "/nonexistent/folder/key"}, BadRequest, "identity"),
    ],
)
def test_mistakes_get_a_clear_error_quickly(options: dict[str, Any], error: type[Exception], says: str) -> None:
    begin = time.monotonic()
    with pytest.raises(error, match=says):
        run(Node.start(**options))  # type: ignore[arg-type]
    assert time.monotonic() - begin < 12


def test_a_port_in_use_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(BadRequest, match=f"port {port} is in use"):
            run(Node.start(host_maddrs=[f"/ip4/127.0.0.1/tcp/{port}"]))  # type: ignore[arg-type]


def test_an_identity_file_keeps_the_peer_id_and_serves_one_process_at_a_time(tmp_path: Path) -> None:
    async def main() -> None:
        first = await Node.start(identity_path=tmp_path / "key")
        try:
            with pytest.raises(BadRequest, match="in use"):
                await Node.start(identity_path=tmp_path / "key")
        finally:
            await first.stop()
        second = await Node.start(identity_path=tmp_path / "key")
        await second.stop()
        assert first.peer_id == second.peer_id

    run(main())


def test_a_start_that_is_cancelled_leaves_no_daemon() -> None:
    async def main() -> None:
        starting = asyncio.create_task(Node.start())
        while not living_children() - before:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting

    before = living_children()
    run(main())
    wait_until(lambda: not living_children() - before, 2)


def test_a_process_that_forgets_to_stop_its_node_ends_quietly_and_takes_the_daemon_along() -> None:
    program = SERVER.replace("await asyncio.sleep(1000)", "await asyncio.sleep(0)")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    peer = done.stdout.strip().rsplit("/", 1)[-1]
    assert peer

    def daemons() -> list[int]:
        return [
            p.pid
            for p in psutil.process_iter(["ppid", "name", "status"])
            if p.info["name"] == "p2pd"
            and p.info["ppid"] == 1
            and p.info["status"] != psutil.STATUS_ZOMBIE
            and p.uids().real == os.getuid()
        ]

    wait_until(lambda: not daemons(), 3)
