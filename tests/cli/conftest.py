"""A swarm with the demo's real model, for the commands that use one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lilliput.cli import process
from lilliput.cli.local_swarm import LocalSwarm
from lilliput.cli.nursery import Nursery
from lilliput.models.sources import ModelFiles

process.share_cores()  # torch is not loaded yet


@pytest.fixture(scope="session")
def swarm(demo_model: ModelFiles, nursery: Nursery) -> Iterator[LocalSwarm]:
    """Three servers with all blocks of the demo model."""
    spans = [(0, 10), (10, 20), (20, 30)]
    with LocalSwarm("smollm2", spans, options=["--dtype", "float32"], nursery=nursery) as swarm:
        yield swarm


@pytest.fixture
def peers(swarm: LocalSwarm) -> list[str]:
    """The option that joins the swarm."""
    return ["--initial-peers", swarm.initial_peers[0]]


@pytest.fixture(scope="session")
def part(demo_model: ModelFiles, nursery: Nursery) -> Iterator[LocalSwarm]:
    """A swarm of one server, with a third of the blocks."""
    with LocalSwarm("smollm2", [(0, 10)], nursery=nursery) as swarm:
        yield swarm
