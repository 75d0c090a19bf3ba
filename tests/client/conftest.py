"""A swarm of real server processes with a tiny model, and clients of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lilliput import AutoDistributedModelForCausalLM
from lilliput.cli.local_swarm import LocalSwarm
from lilliput.cli.nursery import Nursery


@pytest.fixture(scope="session")
def tiny_swarm(tiny_llama: Path) -> Iterator[LocalSwarm]:
    """Three servers, two blocks each, exact enough to compare with."""
    with LocalSwarm(str(tiny_llama), [(0, 2), (2, 4), (4, 6)], options=["--dtype", "float32"]) as swarm:
        yield swarm


@pytest.fixture
def swarm(tiny_llama: Path, nursery: Nursery) -> Iterator[LocalSwarm]:
    """Three servers, two blocks each, for a test that kills some."""
    spans = [(0, 2), (2, 4), (4, 6)]
    with LocalSwarm(str(tiny_llama), spans, options=["--dtype", "float32"], nursery=nursery) as swarm:
        yield swarm


@pytest.fixture(scope="session")
def tiny(tiny_swarm: LocalSwarm, tiny_llama: Path) -> Iterator[Any]:
    """The distributed model."""
    model = AutoDistributedModelForCausalLM.from_pretrained(
        str(tiny_llama), initial_peers=tiny_swarm.initial_peers, dtype="float32"
    )
    yield model
    model.close()


@pytest.fixture(scope="session")
def whole(tiny_llama: Path) -> Any:
    """The same model in one process."""
    return AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
