"""A server in this process, and peers that talk to it over real sockets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from raw_client import Bystander, Peer, Whole, assert_nothing_left, serving

from lilliput import Server


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def whole(tiny_llama: Path) -> Whole:
    return Whole(tiny_llama)


@pytest.fixture(scope="session")
def server(tiny_llama: Path) -> Iterator[Server]:
    """All six blocks of the tiny model, with room for 256 pages."""
    with serving(tiny_llama, max_step_tokens=1024, declare_uids=True) as server:
        yield server


@pytest.fixture(scope="session")
def peer(server: Server, whole: Whole) -> Iterator[Peer]:
    peer = Peer(server, whole)
    yield peer
    peer.stop()


@pytest.fixture(scope="session")
def stranger(server: Server, whole: Whole) -> Iterator[Peer]:
    """Another peer."""
    peer = Peer(server, whole)
    yield peer
    peer.stop()


@pytest.fixture(scope="module")
def _bystander(stranger: Peer) -> Iterator[Bystander]:
    bystander = Bystander(stranger)
    yield bystander
    bystander.stop()


@pytest.fixture
def bystander(server: Server, _bystander: Bystander) -> Iterator[Bystander]:
    """Someone else's session, which must not notice anything. After the test, the server holds nothing besides it."""
    _bystander.at_least(1)
    yield _bystander
    _bystander.at_least(1)
    assert_nothing_left(server, [_bystander.session])


@pytest.fixture
def nothing_left(server: Server) -> Iterator[None]:
    """After the test, the server holds nothing of its sessions."""
    yield
    assert_nothing_left(server)
