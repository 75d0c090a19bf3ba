"""The stand-in for all of a model's blocks: where hidden states leave for the swarm and come back."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lilliput.client.cache import SwarmCache
from lilliput.client.history import PADDING
from lilliput.client.sequential import RemoteSequential
from lilliput.errors import BadRequest
from lilliput.models.holes import base_of

#: the cache's name in a model's arguments, which changed between releases of transformers
CACHE_NAMES = ("cache", "past_key_values")


@dataclass
class _Call:
    """What the model was called with, as far as the blocks need it."""

    cache: SwarmCache | None = None
    #: int64 [rows, tokens], if the model was called with ids and not with embeddings
    input_ids: torch.Tensor | None = None
    #: as given: [rows, length] (1 = a token, 0 = padding), or [rows or 1, 1, tokens, length]
    mask: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None
    #: logits are asked for at the last so many positions only
    needed: int | None = None


class Gate(nn.Module):
    """The first block of a model whose other blocks pass everything through.

    What it must know of a call it learns from hooks on the model: not every family hands everything to its blocks.
    """

    def __init__(self, remote: RemoteSequential) -> None:
        super().__init__()
        self._remote = [remote]  # in a list: not a part of this module
        self._local = threading.local()

    @property
    def remote(self) -> RemoteSequential:
        return self._remote[0]

    @contextlib.contextmanager
    def answering(self, answer: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
        """In this thread, let a function of the hidden states answer instead of the swarm."""
        self._local.answer = answer
        try:
            yield
        finally:
            self._local.answer = None

    def watch(self, model: Any) -> None:
        """Hook into `model`, a causal language model."""
        base = base_of(model)  # not `model.base_model`, which OPT's language model goes around
        if base is not model:
            model.register_forward_pre_hook(_Reader(model, self._see_whole), with_kwargs=True)
        base.register_forward_pre_hook(_Reader(base, self._see_base), with_kwargs=True)

    def _see_whole(self, call: dict[str, Any]) -> dict[str, Any]:
        keep = call.get("logits_to_keep")
        self._local.needed = keep if isinstance(keep, int) and keep > 0 else None
        return {}

    def _see_base(self, call: dict[str, Any]) -> dict[str, Any]:
        cache = next((call[name] for name in CACHE_NAMES if call.get(name) is not None), None)
        if cache is not None and not isinstance(cache, SwarmCache):
            raise BadRequest(
                f"the attention caches of this model are on the servers, so a {type(cache).__name__} is of no use; "
                "call generate(), inside `with model.inference_session(...)` to keep the caches between calls"
            )
        needed = getattr(self._local, "needed", None)
        self._local.needed = None
        ids, mask, position_ids = (
            tensor.cpu() if isinstance(tensor := call.get(name), torch.Tensor) else None
            for name in ("input_ids", "attention_mask", "position_ids")
        )
        self._local.call = _Call(cache, ids, mask, position_ids, needed)
        return {} if cache is not None else {"use_cache": False}

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        answer: Callable[[torch.Tensor], torch.Tensor] | None = getattr(self._local, "answer", None)
        if answer is not None:
            return answer(hidden_states)
        call: _Call = getattr(self._local, "call", None) or _Call()
        if call.cache is not None:
            return _Step(call, call.cache, hidden_states).run()
        rows, tokens = hidden_states.shape[:2]
        mask, _ = _mask_of(call.mask, 0, tokens, None)
        position_ids = _position_ids_of(call.position_ids, 0, rows, tokens)
        return self.remote(hidden_states, mask=mask, position_ids=position_ids)


class _Reader:
    """A forward pre-hook that sees all arguments by name and may add some."""

    def __init__(self, module: nn.Module, see: Any) -> None:
        parameters = inspect.signature(module.forward).parameters
        self._names = list(parameters)
        self._see = see

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        added = self._see({**dict(zip(self._names, args, strict=False)), **kwargs} if args else kwargs)
        if not added or any(name in self._names[: len(args)] for name in added):
            return None
        return args, {**kwargs, **added}


class _Step:
    """One step of a session, as seen from the model."""

    def __init__(self, call: _Call, cache: SwarmCache, hidden: torch.Tensor) -> None:
        self.call, self.cache, self.hidden = call, cache, hidden
        self.session = cache.session

    def run(self) -> torch.Tensor:
        hidden, session, call = self.hidden, self.session, self.call
        rows, count = hidden.shape[:2]
        position = session.position
        if position == 0 and rows > session.max_rows:
            session.restart(rows)
        mask, padding = _mask_of(call.mask, position, count, session.tokens if position else None)
        ids = call.input_ids
        tokens = None
        if ids is not None and (mask is None or padding is not None):
            tokens = ids if padding is None else torch.where(padding[:, position:], ids, PADDING)
        position_ids = _position_ids_of(call.position_ids, position, rows, count)
        if position_ids is not None and not _follows(position_ids, padding, position):
            tokens = None

        repeats = _repeats(tokens) if position == 0 and rows > 1 and tokens is not None else None
        if repeats is not None:  # beams begin alike: they are computed once
            first = repeats[0]
            hidden = hidden[first]
            tokens, mask, position_ids = (None if t is None else t[first] for t in (tokens, mask, position_ids))
        outputs = session.step(hidden, tokens=tokens, needed=call.needed, mask=mask, position_ids=position_ids)
        if repeats is not None:
            session.reorder(repeats[1])
            outputs = outputs[repeats[1]]
        if outputs.shape[1] < count:  # the servers had the beginning in their caches, and nobody asks for its outputs
            outputs = nn.functional.pad(outputs, (0, 0, count - outputs.shape[1], 0))
        return outputs.to(self.hidden.device)


def _repeats(tokens: torch.Tensor) -> tuple[list[int], list[int]] | None:
    """The rows of `tokens` `[rows, n]` that differ from those before them, and for each row which of these it equals.

    None if all differ.
    """
    unique, inverse = torch.unique_consecutive(tokens, dim=0, return_inverse=True)
    if len(unique) == len(tokens):
        return None
    rows: list[int] = inverse.tolist()
    return [rows.index(row) for row in range(len(unique))], rows


def _mask_of(
    mask: torch.Tensor | None, position: int, count: int, seen: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The step's mask (bool `[rows or 1, tokens, length]`), and what is no padding (bool `[rows, length]`).

    None and None if there is no padding; a mask and None if the caller has made a mask of four dimensions.
    """
    if mask is None:
        return None, None
    length = position + count
    if mask.dim() == 4:
        full = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
        return full[:, 0, :, :length], None
    if mask.dim() != 2:
        raise BadRequest(f"an attention mask has two or four dimensions, not {mask.dim()}")
    visible = mask.bool()
    if visible.shape[1] == count and position and seen is not None:  # of the new tokens only
        visible = torch.cat([seen != PADDING, visible], dim=1)
    if visible.shape[1] != length:
        raise BadRequest(
            f"an attention mask of {mask.shape[1]} tokens for {count} new ones after {position} in the session"
        )
    if bool(visible.all()):
        return None, None
    places = torch.arange(length)
    causal = places[None, :] <= places[position:, None]
    # padding attends to itself, since something has to be computed there; nothing else attends to it
    own = places[None, :] == places[position:, None]
    return (visible[:, None, :] & causal) | own, visible


def _position_ids_of(ids: torch.Tensor | None, position: int, rows: int, count: int) -> torch.Tensor | None:
    """int64 `[rows, tokens]`, or None if they are the places in the cache."""
    if ids is None or _is_default(ids, position):
        return None
    if ids.dim() != 2:
        raise BadRequest(f"position ids have two dimensions, not {ids.dim()}")
    return ids.expand(rows, count).to(torch.int64)


def _is_default(ids: torch.Tensor, position: int) -> bool:
    return bool((ids == torch.arange(position, position + ids.shape[-1])).all())


def _follows(ids: torch.Tensor, padding: torch.Tensor | None, position: int) -> bool:
    """Whether position ids are those that generate() makes of the padding."""
    if padding is None:
        return False
    counted = padding.long().cumsum(-1)[:, position:] - 1
    return bool(((ids == counted) | ~padding[:, position:]).all())
