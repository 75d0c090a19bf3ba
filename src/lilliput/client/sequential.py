"""Remote blocks as a module: outputs and gradients to the inputs, without caches."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Coroutine, MutableSequence, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from lilliput.client.connection import Patience, SharedConnection
from lilliput.client.passes import Extras, Pass, PassLeg
from lilliput.client.recovery import Recovery
from lilliput.client.remote import RemoteModel, trusted_set
from lilliput.client.tasks import all_of
from lilliput.errors import BadRequest
from lilliput.swarm.swarm_key import SwarmKey

T = TypeVar("T")

#: a batch is cut into parts of about this many tokens, which follow one another through the chain
_PART_TOKENS = 1024
_PART_BYTES = 32 << 20
#: parts that are on their way at once
_PARTS_AT_ONCE = 8
#: of the servers that others took the places of, the last so many are remembered
_RECOVERIES = 1000


class _RemoteFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, blocks: RemoteSequential, extras: Extras) -> torch.Tensor:
        ctx.blocks = blocks
        outputs, ctx.passes = blocks._forward(hidden, extras)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.blocks._backward(ctx.passes, grad), None, None


_Passes = list[tuple[slice, Pass, list[PassLeg]]]


class RemoteSequential(nn.Module):
    """A run of a remote model's blocks. `blocks[3:7]` and `blocks[3]` are runs, too; `len(blocks)` counts them.

    It holds no parameters. Gradients go to the inputs: the servers recompute what they need from the inputs of their
    own blocks, which this side keeps between forward and backward.

    :ivar recoveries: what happened to the servers of all passes so far, also through runs that were cut out of this
        one: who took over what, why, and how long a part of a batch waited for it. The last 1000; may be cleared.
    """

    def __init__(
        self,
        remote: RemoteModel,
        shared: SharedConnection,
        start: int = 0,
        end: int | None = None,
        *,
        recoveries: MutableSequence[Recovery] | None = None,
    ) -> None:
        super().__init__()
        self.remote_model, self._shared = remote, shared
        self.recoveries = deque[Recovery](maxlen=_RECOVERIES) if recoveries is None else recoveries
        self.start, self.end = start, remote.blocks if end is None else end
        if not 0 <= self.start < self.end <= remote.blocks:
            raise BadRequest(f"blocks {self.start}:{self.end} are not blocks of a model with {remote.blocks}")

    @classmethod
    def from_pretrained(
        cls,
        model: str,
        *,
        initial_peers: list[str] | tuple[str, ...] | str,
        swarm_key: SwarmKey | str | os.PathLike[str] | None = None,
        trusted_peers: Sequence[str] | str = (),
        revision: str | None = None,
        token: str | None = None,
        adapter: str = "",
        codec: str = "none",
        patience: Patience | None = None,
        request_id: str = "",
    ) -> RemoteSequential:
        """All blocks of a model in a swarm; only its configuration is needed here."""
        from lilliput.models.sources import resolve

        trusted = trusted_set(trusted_peers)
        shared = SharedConnection.to(initial_peers, swarm_key=SwarmKey.of(swarm_key))
        try:
            files = resolve(model, revision=revision, token=token, weights=False)
            remote = RemoteModel(
                shared.connection,
                files.name,
                files.blocks,
                files.fingerprint,
                adapter=adapter,
                codec=codec,
                patience=patience or Patience(),
                trusted_peers=trusted,
                request_id=request_id,
            )
            return cls(remote, shared)
        except BaseException:
            shared.close()
            raise

    def __len__(self) -> int:
        return self.end - self.start

    def __getitem__(self, index: int | slice) -> RemoteSequential:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1 or start >= stop:
                raise IndexError(f"{index} is not a run of consecutive blocks")
        else:
            if not -len(self) <= index < len(self):
                raise IndexError(f"there are {len(self)} blocks, not block {index}")
            start = index % len(self)
            stop = start + 1
        span = self.start + start, self.start + stop
        return RemoteSequential(self.remote_model, self._shared, *span, recoveries=self.recoveries)

    def close(self) -> None:
        """End the connection that `from_pretrained` made. The blocks of a model end with `model.close()`."""
        self._shared.close()

    def extra_repr(self) -> str:
        return f"{self.remote_model.name!r}, blocks {self.start}:{self.end}"

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        prompts: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Outputs `[rows, tokens, hidden]` for inputs of that shape, in their dtype.

        :param mask: bool `[rows or 1, tokens, tokens]`, true = attend. Default: causal.
        :param position_ids: int64 `[rows, tokens]`. Default: 0, 1, 2, ...
        :param prompts: `[blocks, rows, tokens, hidden]`, added before each block

        Raises `MissingBlocks`, `BadRequest`, or what the last of a few servers failed with.
        """
        if hidden_states.dim() != 3:
            raise BadRequest(f"hidden states must be [rows, tokens, hidden], not {list(hidden_states.shape)}")
        if prompts is not None and prompts.requires_grad and torch.is_grad_enabled():
            raise BadRequest("gradients to deep prompts are not computed yet; detach them")
        if not hidden_states.numel():
            return hidden_states
        extras = Extras(self.start, mask, position_ids, prompts)
        if hidden_states.requires_grad and torch.is_grad_enabled():
            outputs: torch.Tensor = _RemoteFunction.apply(hidden_states, self, extras)  # type: ignore[no-untyped-call]
            return outputs
        return self._forward(hidden_states, extras)[0]

    def _forward(self, hidden: torch.Tensor, extras: Extras) -> tuple[torch.Tensor, _Passes]:
        device, hidden = hidden.device, hidden.detach().cpu()
        outputs = torch.empty_like(hidden)

        async def one(rows: slice) -> tuple[slice, Pass, list[PassLeg]]:
            part = Pass(self.remote_model, extras.rows(rows.start, rows.stop), self.recoveries)
            outputs[rows], legs = await part.forward(hidden[rows], self.start, self.end)
            return rows, part, legs

        passes = self._shared.run(_at_once([partial(one, rows) for rows in _parts(hidden)]))
        return outputs.to(device), passes

    def _backward(self, passes: _Passes, grad: torch.Tensor) -> torch.Tensor:
        device, grad = grad.device, grad.detach().cpu()
        inputs_grad = torch.empty_like(grad)

        async def one(rows: slice, part: Pass, legs: list[PassLeg]) -> None:
            inputs_grad[rows] = await part.backward(legs, grad[rows])

        self._shared.run(_at_once([partial(one, *part) for part in passes]))
        return inputs_grad.to(device)


def _parts(hidden: torch.Tensor) -> list[slice]:
    rows, tokens, width = hidden.shape
    by_bytes = _PART_BYTES // (tokens * width * hidden.element_size())
    count = max(1, min(_PART_TOKENS // tokens, by_bytes))
    return [slice(begin, min(begin + count, rows)) for begin in range(0, rows, count)]


async def _at_once(work: Sequence[Callable[[], Coroutine[Any, Any, T]]]) -> list[T]:
    """Results in order, a bounded number at a time; the first error ends them all."""
    places = asyncio.Semaphore(_PARTS_AT_ONCE)

    async def in_turn(item: Callable[[], Coroutine[Any, Any, T]]) -> T:
        async with places:
            return await item()

    return await all_of([asyncio.create_task(in_turn(item)) for item in work])
