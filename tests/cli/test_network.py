"""The emulated network of the benchmark: its links over plain TCP."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from lilliput.cli.bench.network import Link, Network

MARGIN = 2.0


@pytest.fixture
def network() -> Iterator[Network]:
    with Network() as network:
        yield network


@pytest.fixture
def echo() -> Iterator[int]:
    """The port of a server that sends everything back."""

    def serve(connection: socket.socket) -> None:
        with connection:
            while data := connection.recv(1 << 16):
                connection.sendall(data)

    def accept() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=accept, daemon=True).start()
        yield listening.getsockname()[1]
        listening.shutdown(socket.SHUT_RDWR)


def connect(link: Link) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", link.port), timeout=5)
    connection.settimeout(5)
    return connection


def receive(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            break
        data += part
    return data


def round_trip(connection: socket.socket, data: bytes = b"x") -> float:
    begun = time.perf_counter()
    connection.sendall(data)
    assert receive(connection, len(data)) == data
    return time.perf_counter() - begun


def test_both_ways_are_delayed_and_the_delay_may_change(network: Network, echo: int) -> None:
    link = network.link(echo, delay=0.05)
    with connect(link) as connection:
        assert 0.1 <= round_trip(connection) < 0.1 + MARGIN
        link.delay = 0.0
        assert min(round_trip(connection) for _ in range(3)) < 0.1
        assert link.connections == link.accepted == 1


def test_jitter_delays_and_keeps_the_order(network: Network, echo: int) -> None:
    data = bytes(i % 251 for i in range(100_000))
    with connect(network.link(echo, jitter=0.02)) as connection:
        for begin in range(0, len(data), 1000):
            connection.sendall(data[begin : begin + 1000])
        assert receive(connection, len(data)) == data


def test_bandwidth_is_bounded(network: Network, echo: int) -> None:
    with connect(network.link(echo, bytes_per_second=500_000)) as connection:
        took = round_trip(connection, bytes(100_000))
        assert 0.2 <= took < 0.5 + MARGIN


def test_much_data_on_a_long_way_is_not_slowed_down_by_it(network: Network, echo: int) -> None:
    with connect(network.link(echo, delay=0.1)) as connection:
        sending = threading.Thread(target=connection.sendall, args=(bytes(4 << 20),))
        begun = time.perf_counter()
        sending.start()
        assert len(receive(connection, 4 << 20)) == 4 << 20
        assert 0.2 <= time.perf_counter() - begun < 10
        sending.join()


def test_a_cut_breaks_connections_until_it_is_mended(network: Network, echo: int) -> None:
    link = network.link(echo)
    with connect(link) as connection:
        round_trip(connection)
        network.cut(link)
        with pytest.raises((ConnectionError, AssertionError)):
            round_trip(connection)
    with pytest.raises((ConnectionError, AssertionError)), connect(link) as refused:
        round_trip(refused)
    network.mend(link)
    with connect(link) as connection:
        round_trip(connection)


def test_a_stalled_link_is_silent_and_then_goes_on(network: Network, echo: int) -> None:
    link = network.link(echo)
    with connect(link) as connection:
        round_trip(connection)
        network.stall(link)
        connection.settimeout(0.3)
        connection.sendall(b"hello")
        with pytest.raises(TimeoutError):
            connection.recv(5)
        network.mend(link)
        connection.settimeout(5)
        assert receive(connection, 5) == b"hello"


def test_an_end_arrives_at_the_other_side(network: Network, echo: int) -> None:
    with connect(network.link(echo, delay=0.02)) as connection:
        connection.sendall(b"last words")
        connection.shutdown(socket.SHUT_WR)
        assert receive(connection, 100) == b"last words"
