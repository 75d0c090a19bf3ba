"""The cache that holds nothing, without a network."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Cache

from lilliput.client.cache import SwarmCache


class Session:
    """The part of an inference session that the cache uses."""

    def __init__(self, position: int, rows: int) -> None:
        self.position, self.rows = position, rows
        self.parents: list[list[int]] = []

    def reorder(self, parents: Any) -> None:
        self.parents.append(list(parents))
        self.rows = len(parents)


def cache(position: int = 10, rows: int = 2) -> tuple[SwarmCache, Session]:
    session = Session(position, rows)
    return SwarmCache(session, 6), session  # type: ignore[arg-type]


def test_it_answers_what_generate_asks_from_the_session() -> None:
    swarm_cache, session = cache()
    assert isinstance(swarm_cache, Cache)
    assert swarm_cache
    assert swarm_cache.get_seq_length() == swarm_cache.get_query_offset() == 10
    assert swarm_cache.get_mask_sizes(3, 0) == (13, 0)
    assert swarm_cache.get_mask_sizes(torch.arange(10, 13), 0) == (13, 0)
    assert len(swarm_cache) == len(swarm_cache.is_linear) == len(swarm_cache.is_sliding) == 6
    assert not any(swarm_cache.is_linear)
    assert swarm_cache.is_croppable
    assert not swarm_cache.is_compileable
    swarm_cache.activate_past_recording()
    assert session.position == 10


@pytest.mark.parametrize(("argument", "position"), [(-3, 7), (0, 10), (-99, 0), (4, 4), (10, 10), (50, 10)])
def test_crop_takes_tokens_to_remove_and_the_older_length_to_keep(argument: int, position: int) -> None:
    swarm_cache, session = cache()
    swarm_cache.crop(argument)
    assert session.position == position


def test_rows_are_reordered_repeated_and_selected() -> None:
    swarm_cache, session = cache()
    swarm_cache.reorder_cache(torch.tensor([1, 0]))
    swarm_cache.reorder_cache(torch.tensor([0, 1]))  # nothing to tell
    swarm_cache.batch_repeat_interleave(2)
    swarm_cache.batch_select_indices(torch.tensor([0, 3]))
    swarm_cache.batch_select_indices(torch.tensor([False, True]))
    assert session.parents == [[1, 0], [0, 0, 1, 1], [0, 3], [1]]


def test_nothing_can_be_written_into_it() -> None:
    with pytest.raises(TypeError, match="swarm"):
        cache()[0].update(torch.zeros(1), torch.zeros(1), 0)
