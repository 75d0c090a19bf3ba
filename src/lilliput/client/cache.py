"""The client's attention cache, which holds nothing: the caches are in the session, on the servers.

Beam search, assisted generation and prompt lookup work because they only ask a cache how long it is, to reorder its
rows, and to forget its end. The session can do all three.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import Cache

from lilliput.client.session import InferenceSession


class SwarmCache(Cache):  # type: ignore[misc]
    """What Hugging Face's `generate` takes for the model's cache.

    :param blocks: of the whole model
    """

    is_compileable = False
    is_croppable = True
    is_initialized = True

    def __init__(self, session: InferenceSession, blocks: int) -> None:
        # Not the base class's own: what it asks for differs between releases, and is about layers that hold something.
        self.session = session
        self.layers: list[Any] = []
        self._blocks = blocks

    def __len__(self) -> int:
        return self._blocks

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"SwarmCache({self.session.position} tokens)"

    # -- how long it is

    def get_seq_length(self, layer_idx: int = 0, *args: Any) -> int:
        return self.session.position

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.session.position

    def get_mask_sizes(self, query_length: int | torch.Tensor, layer_idx: int = 0) -> tuple[int, int]:
        # older releases hand in the positions themselves
        count = query_length.shape[0] if isinstance(query_length, torch.Tensor) else query_length
        return self.session.position + count, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return -1

    @property
    def batch_size(self) -> int:
        return self.session.rows or -1

    # -- changing it

    def crop(self, tokens: int) -> None:
        """Forget the last `-tokens` tokens; or, if positive, all but the first `tokens`, as older releases mean it."""
        position = self.session.position
        if tokens < 0:
            self.session.position = max(position + tokens, 0)
        elif 0 < tokens < position:
            self.session.position = tokens

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._reorder(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._reorder([row for row in range(self.session.rows) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        rows = torch.arange(self.session.rows, device=indices.device)
        self._reorder(rows[indices].tolist())

    def _reorder(self, parents: Sequence[int]) -> None:
        if list(parents) != list(range(self.session.rows)):
            self.session.reorder(parents)

    def reset(self) -> None:
        self.session.position = 0

    def activate_past_recording(self) -> None:
        """Rollback needs no preparation."""

    # -- what it is made of

    @property
    def is_sliding(self) -> list[bool]:
        return [False] * self._blocks

    @property
    def is_linear(self) -> list[bool]:
        return [False] * self._blocks

    @property
    def is_dummy(self) -> list[bool]:
        return [False] * self._blocks

    def update(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("this model's attention is computed by the swarm; nothing is written into its cache here")
