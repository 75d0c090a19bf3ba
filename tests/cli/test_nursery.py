"""Servers made by forking a process that has loaded their libraries."""

from __future__ import annotations

from lilliput.cli.nursery import Nursery
from lilliput.models.sources import ModelFiles


def test_it_ends_servers_that_nobody_else_ends(demo_model: ModelFiles) -> None:
    """As when a signal comes just after one was made."""
    with Nursery() as nursery:
        server = nursery.spawn(["serve", "smollm2", "--blocks", "0:1", "--host", "127.0.0.1", "--supervised"])
        assert server.poll() is None
    assert server.poll() is not None
