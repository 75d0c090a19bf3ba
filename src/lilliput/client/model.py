"""The user's model: Hugging Face's own class, its blocks in the swarm."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

from lilliput.client.connection import Patience, SharedConnection
from lilliput.client.remote import REPLAY_BYTES, RemoteModel, trusted_set
from lilliput.collector import collector_paused
from lilliput.errors import BadRequest, MissingBlocks
from lilliput.models.progress import Progress, silent
from lilliput.models.sources import ModelFiles, resolve
from lilliput.swarm.swarm_key import SwarmKey

_POLL_SECONDS = 0.25


class AutoDistributedModelForCausalLM:
    """Makes a causal language model whose blocks are computed by a swarm. See `from_pretrained`."""

    def __init__(self) -> None:
        raise TypeError("call AutoDistributedModelForCausalLM.from_pretrained(...)")

    @classmethod
    def from_pretrained(
        cls,
        model: str,
        *,
        initial_peers: Sequence[str] | str,
        swarm_key: SwarmKey | str | os.PathLike[str] | None = None,
        trusted_peers: Sequence[str] | str = (),
        dtype: Any = None,
        revision: str | None = None,
        token: str | None = None,
        adapter: str = "",
        codec: str = "none",
        patience: Patience | None = None,
        wait: float | None = 0.0,
        prefix_secret: str | None = None,
        replay_bytes: int = REPLAY_BYTES,
        push: bool = True,
        audit: float = 0.0,
        request_id: str = "",
        progress: Progress = silent,
    ) -> Any:
        """Hugging Face's own model class, with embedding, norm and head here and all blocks in the swarm.

        `generate()` and everything else of Hugging Face's works unchanged. Besides, the model has

            inference_session(max_length)   keeps the caches between calls of generate()
            remote                          all its blocks as a `RemoteSequential`
            close()                         ends the connection; also done when the program ends

        :param model: a name, folder or hub id, as for the servers; the ends of the model are loaded from its files
        :param initial_peers: full addresses of peers of the swarm, such as the servers print
        :param swarm_key: of a private swarm, or the file that holds it
        :param trusted_peers: ids or addresses of peers that alone may compute the first and the last block, and from
            these on whatever they hold: there text can be read; default: any server may
        :param dtype: of the ends and of what is sent ("float32", torch.bfloat16, ...); default: the checkpoint's
        :param adapter: the name of an adapter that the servers have
        :param codec: how hidden states travel: none, float16, bfloat16, int8
        :param patience: how long to wait for what
        :param wait: seconds to wait until every block is served; 0 raises `MissingBlocks` at once; None: it does not
            matter whether anybody is there yet
        :param prefix_secret: clients that share it share cached prefixes where servers allow it; default: nobody
        :param replay_bytes: without push, memory of each session for hidden states between servers, kept in case that
            one fails; what is not kept, the other servers compute again then
        :param push: servers send outputs straight to the next server, where they can reach it, instead of through here
        :param audit: the share of what each server returns in sessions that is computed once more by another one;
            who is found to return something else is not used any more. Turns `push`, and the reuse of cached prefixes
            between sessions, off.
        :param request_id: stands in the servers' logs beside what is done for this model; a session may bring another

        Raises `ModelError`, `BadRequest`, `Unreachable` (no peer answers), or `MissingBlocks`.
        """
        trusted = trusted_set(trusted_peers)
        shared = SharedConnection.to(
            initial_peers, swarm_key=SwarmKey.of(swarm_key)
        )  # it connects while the model loads
        try:
            files = resolve(model, revision=revision, token=token, weights=False, progress=progress)
            files.fetch("ends", progress)
            shared.loop.submit(shared.connection.prefetch(files.name))
            remote = RemoteModel(
                shared.connection,
                files.name,
                files.blocks,
                files.fingerprint,
                adapter=adapter,
                codec=codec,
                patience=patience or Patience(),
                prefix_secret=prefix_secret,
                replay_bytes=replay_bytes,
                push=push and not audit,
                trusted_peers=trusted,
                audit=audit,
                request_id=request_id,
            )
            distributed = _load(files, remote, shared, dtype)
            if wait is not None:
                _await_blocks(remote, shared, wait)
            return distributed
        except BaseException:
            shared.close()
            raise


def _load(files: ModelFiles, remote: RemoteModel, shared: SharedConnection, dtype: Any) -> Any:
    # transformers takes a second or more to import: not before the connection is on its way
    with collector_paused():
        from lilliput.client.gate import Gate
        from lilliput.client.generation import DistributedMixin
        from lilliput.client.sequential import RemoteSequential
        from lilliput.models.ends import load_ends

    blocks = RemoteSequential(remote, shared)
    gate = Gate(blocks)
    model: Any = load_ends(files, gate, dtype=dtype_of(dtype, files))
    gate.watch(model)
    family = type(model)
    model.__class__ = type(family.__name__, (DistributedMixin, family), {"__module__": family.__module__})
    model._join(remote, shared, gate)
    return model


def _await_blocks(remote: RemoteModel, shared: SharedConnection, wait: float) -> None:
    until = time.monotonic() + wait
    while True:
        try:
            shared.run(remote.chain(0, remote.blocks))
            return
        except MissingBlocks:
            if time.monotonic() >= until:
                raise
        time.sleep(_POLL_SECONDS)


def dtype_of(dtype: Any, files: ModelFiles) -> Any:
    """A torch dtype from a dtype, its name, or None and "auto" for the checkpoint's own."""
    import torch

    chosen: Any = dtype
    if chosen is None or chosen == "auto":
        config = files.config()
        chosen = config.get("dtype") or config.get("torch_dtype") or "float32"
    if isinstance(chosen, str):
        chosen = getattr(torch, chosen.removeprefix("torch."), None)
    if not isinstance(chosen, torch.dtype) or not chosen.is_floating_point:
        raise BadRequest(f"dtype must be float32, bfloat16 or float16, by name or as torch has it, not {dtype!r}")
    return chosen
