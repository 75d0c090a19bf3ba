"""What a distributed model adds to Hugging Face's class: sessions, and where generate() keeps its caches."""

from __future__ import annotations

import contextlib
import inspect
import threading
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin

from lilliput.client.async_session import AsyncInferenceSession
from lilliput.client.cache import SwarmCache
from lilliput.client.connection import SharedConnection
from lilliput.client.gate import CACHE_NAMES, Gate
from lilliput.client.history import PADDING
from lilliput.client.remote import RemoteModel
from lilliput.client.sequential import RemoteSequential
from lilliput.client.server_session import QueueCallback
from lilliput.client.session import InferenceSession
from lilliput.errors import BadRequest

#: what generate() adds to the prompt when nobody says how much
_DEFAULT_NEW_TOKENS = 20
#: the name under which this release of transformers takes a cache
_CACHE_NAME = next(
    name for name in CACHE_NAMES if name in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
)


class _ActiveSessions(threading.local):
    """Sessions that this thread has entered, the innermost last."""

    def __init__(self) -> None:
        self.sessions: list[InferenceSession] = []


class DistributedMixin:
    """Stands before a family's class, which it makes generate through the swarm."""

    def _join(self, remote: RemoteModel, shared: SharedConnection, gate: Gate) -> None:
        self._remote_model, self._shared = remote, shared
        self._active = _ActiveSessions()
        object.__setattr__(self, "_gate", gate)  # it is a block of this model already

    @property
    def remote(self) -> RemoteSequential:
        """All blocks of the model, as a module."""
        return self._gate.remote  # type: ignore[attr-defined, no-any-return]

    def inference_session(
        self,
        max_length: int,
        *,
        rows: int = 1,
        bid: float = 0.0,
        on_queue: QueueCallback | None = None,
        request_id: str = "",
    ) -> InferenceSession:
        """Attention caches in the swarm that stay between calls of generate(). Use it with `with`.

        :param max_length: tokens per row (prompt and answers together)
        :param rows: sequences at once: batch x beams. generate() makes it more when it needs more.
        :param bid: a higher one stands earlier in the queues of full servers
        :param on_queue: called with a hop and a server's `Info` at every change of place in a queue
        :param request_id: stands in the logs of the servers: 1 to 128 letters, digits or any of . _ ~ : / + = @ -

        The servers are asked for room at the first step. Raises `MissingBlocks` at once if blocks are not served.
        """
        self._shared.run(self._remote_model.chain(0, self._remote_model.blocks))
        return self._session(max_length, rows=rows, bid=bid, on_queue=on_queue, request_id=request_id)

    def close(self) -> None:
        """End the connection to the swarm, unless another model of this process uses it."""
        self._shared.close()

    def generate(
        self,
        inputs: torch.Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *args: Any,
        session: InferenceSession | None = None,
        **kwargs: Any,
    ) -> Any:
        """Hugging Face's generate(), with the attention caches in the swarm.

        Outside of a session the caches are given back when it returns. Inside `with model.inference_session(...)`
        (or with `session=`), they stay: pass the whole conversation each time, as always with Hugging Face, and only
        the tokens are computed that the session has not seen. Where the conversation differs from what it has seen,
        the session goes back to the last common token. To go on without repeating what is in the session, pass the new
        ids alone, with an `attention_mask` that covers all tokens (transformers 5), or prepend `session.tokens`.
        """
        config = generation_config if generation_config is not None else self.generation_config  # type: ignore[attr-defined]

        def option(name: str) -> Any:
            return kwargs[name] if kwargs.get(name) is not None else getattr(config, name, None)

        def hugging_face(**cache: SwarmCache) -> Any:
            return super(DistributedMixin, self).generate(inputs, generation_config, *args, **kwargs, **cache)  # type: ignore[misc]

        if option("use_cache") is False or any(kwargs.get(name) is not None for name in CACHE_NAMES):
            if session is not None:
                raise BadRequest("a session is of no use beside another cache, or with use_cache=False")
            return hugging_face()
        ids = inputs if inputs is not None else kwargs.get("input_ids")
        given = ids if ids is not None else kwargs.get("inputs_embeds")
        batch, length = given.shape[:2] if given is not None else (1, 1)
        rows = batch * max(option("num_beams") or 1, option("num_return_sequences") or 1)
        if session is None and self._active.sessions:
            session = self._active.sessions[-1]
        if session is not None:
            _go_back(session, ids, kwargs.get("attention_mask"), rows)
            return hugging_face(**{_CACHE_NAME: SwarmCache(session, len(self.remote))})
        if option("max_new_tokens"):
            length += option("max_new_tokens")
        else:
            length = max(option("max_length") or 0, length + _DEFAULT_NEW_TOKENS)
        with contextlib.closing(self._session(max(length, 1), rows=rows, extend=True)) as session:
            return hugging_face(**{_CACHE_NAME: SwarmCache(session, len(self.remote))})

    def _session(self, max_length: int, **options: Any) -> InferenceSession:
        core = AsyncInferenceSession(self._remote_model, max_length=max_length, **options)
        return InferenceSession(self._shared, core, self._active.sessions)


def _go_back(session: InferenceSession, ids: torch.Tensor | None, mask: torch.Tensor | None, rows: int) -> None:
    """Set a session back to where it agrees with the conversation `ids` `[batch, n]`, in each of `rows` rows."""
    position = session.position
    if position and ids is not None and mask is not None and mask.shape[1:] == (position + ids.shape[1],):
        # only what is new was passed
        if rows != session.rows:
            raise BadRequest(f"{rows} rows, but the session has {session.rows}; pass the whole conversation")
        return
    if rows > session.max_rows:
        session.restart(rows)
        return
    parents: list[int] = []
    common = 0
    if ids is not None and position:
        known = ids.cpu()
        if mask is not None and mask.shape == ids.shape:
            known = torch.where(mask.cpu().bool(), known, PADDING)
        parents, common = session.continues(known.repeat_interleave(rows // len(ids), dim=0))
        common = min(common, ids.shape[1] - 1)  # the last token's logits are asked for
    if common and parents != list(range(session.rows)):
        session.reorder(parents)
    session.position = common
