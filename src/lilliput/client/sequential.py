"""Remote blocks as a module: outputs and gradients to the inputs, without caches."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from lilliput.client.connection import Patience, SharedConnection
from lilliput.client.costs import PASSES
from lilliput.client.remote import RemoteModel, trusted_set
from lilliput.client.route import Hop
from lilliput.client.tasks import all_of
from lilliput.errors import BadRequest, LilliputError, MissingBlocks, Unreachable
from lilliput.swarm.membership import SwarmKey
from lilliput.wire import lilliput_pb2 as pb
from lilliput.wire.protocol import BACKWARD, FORWARD

T = TypeVar("T")

#: a batch is cut into parts of about this many tokens, which follow one another through the chain
_PART_TOKENS = 1024
_PART_BYTES = 32 << 20
#: parts that are on their way at once
_PARTS_AT_ONCE = 8


@dataclass(frozen=True)
class _Extras:
    """What goes along with the hidden states of one part. Shapes as in `lilliput.proto`."""

    start: int
    mask: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None
    prompts: torch.Tensor | None = None

    def of(self, hop: Hop) -> dict[str, torch.Tensor]:
        prompts = None if self.prompts is None else self.prompts[hop.start - self.start : hop.end - self.start]
        tensors = {"mask": self.mask, "position_ids": self.position_ids, "prompts": prompts}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    def rows(self, begin: int, end: int) -> _Extras:
        mask = self.mask if self.mask is None or self.mask.shape[0] == 1 else self.mask[begin:end]
        ids = None if self.position_ids is None else self.position_ids[begin:end]
        return _Extras(self.start, mask, ids, None if self.prompts is None else self.prompts[:, begin:end])


@dataclass(frozen=True)
class _Leg:
    """One server's share of a forward pass, with the inputs it had: all that its backward pass needs."""

    hop: Hop
    inputs: torch.Tensor


class _Pass:
    """Forward and backward of one part of a batch through whatever servers there are.

    When a server fails, the others are asked; `patience.attempts` bounds how often.
    """

    def __init__(self, remote: RemoteModel, extras: _Extras) -> None:
        self._remote, self._extras = remote, extras
        self._failures = 0
        self._banned: set[str] = set()
        self._last_error: LilliputError | None = None

    async def forward(self, hidden: torch.Tensor, start: int, end: int) -> tuple[torch.Tensor, list[_Leg]]:
        legs: list[_Leg] = []
        while start < end:
            for hop in await self._chain(start, end):
                try:
                    output = await self._ask(hop, FORWARD, {"hidden": hidden})
                except LilliputError as e:
                    self._failed(hop, e)
                    break
                legs.append(_Leg(hop, hidden))
                hidden, start = output, hop.end
        return hidden, legs

    async def backward(self, legs: list[_Leg], grad: torch.Tensor) -> torch.Tensor:
        for leg in reversed(legs):
            grad = await self._backward_leg(leg, grad)
        return grad

    async def _backward_leg(self, leg: _Leg, grad: torch.Tensor) -> torch.Tensor:
        hop = leg.hop
        while True:
            if hop.peer_id in self._banned:
                chain = await self._chain(hop.start, hop.end)
                if len(chain) > 1:  # its blocks are spread over several servers now: their inputs have to be made first
                    _, legs = await self.forward(leg.inputs, hop.start, hop.end)
                    return await self.backward(legs, grad)
                hop = chain[0]
            try:
                return await self._ask(hop, BACKWARD, {"hidden": leg.inputs, "grad": grad})
            except LilliputError as e:
                self._failed(hop, e)

    async def _chain(self, start: int, end: int) -> list[Hop]:
        try:
            return await self._remote.chain(start, end, banned=self._banned, use=PASSES)
        except MissingBlocks as e:
            raise self._last_error or e from None

    async def _ask(self, hop: Hop, call: str, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        remote = self._remote

        def question() -> pb.Message:
            body: dict[str, Any] = {
                "model": remote.name,
                "start": hop.start,
                "end": hop.end,
                "adapter": remote.adapter,
                "codec": remote.codec,
                "request_id": remote.request_id,
            }
            return (
                pb.Message(forward=pb.Forward(**body)) if call == FORWARD else pb.Message(backward=pb.Backward(**body))
            )

        answer = await remote.connection.ask(
            hop.peer_id,
            call,
            question,
            {**tensors, **self._extras.of(hop)},
            codec=remote.codec,
            patience=remote.patience,
        )
        output = answer.get("hidden" if call == FORWARD else "grad")
        hidden = tensors["hidden"]
        if output is None or output.shape != hidden.shape:
            raise Unreachable(f"server {hop} returned something else than was asked for", hop.peer_id)
        return output.to(hidden.dtype)

    def _failed(self, hop: Hop, error: LilliputError) -> None:
        error.args = (f"server {hop}: {error}", *error.args[1:])
        self._failures += 1
        if not error.retry_elsewhere or self._failures >= self._remote.patience.attempts:
            raise error
        self._last_error = error
        self._banned.add(hop.peer_id)
        if isinstance(error, Unreachable):
            self._remote.connection.ban(hop.peer_id)


class _RemoteFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, blocks: RemoteSequential, extras: _Extras) -> torch.Tensor:
        ctx.blocks = blocks
        outputs, ctx.passes = blocks._forward(hidden, extras)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.blocks._backward(ctx.passes, grad), None, None


_Passes = list[tuple[slice, _Pass, list[_Leg]]]


class RemoteSequential(nn.Module):
    """A run of a remote model's blocks. `blocks[3:7]` and `blocks[3]` are runs, too; `len(blocks)` counts them.

    It holds no parameters. Gradients go to the inputs: the servers recompute what they need from the inputs of their
    own blocks, which this side keeps between forward and backward.
    """

    def __init__(self, remote: RemoteModel, shared: SharedConnection, start: int = 0, end: int | None = None) -> None:
        super().__init__()
        self.remote_model, self._shared = remote, shared
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
        return RemoteSequential(self.remote_model, self._shared, self.start + start, self.start + stop)

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
        extras = _Extras(self.start, mask, position_ids, prompts)
        if hidden_states.requires_grad and torch.is_grad_enabled():
            outputs: torch.Tensor = _RemoteFunction.apply(hidden_states, self, extras)  # type: ignore[no-untyped-call]
            return outputs
        return self._forward(hidden_states, extras)[0]

    def _forward(self, hidden: torch.Tensor, extras: _Extras) -> tuple[torch.Tensor, _Passes]:
        device, hidden = hidden.device, hidden.detach().cpu()
        outputs = torch.empty_like(hidden)

        async def one(rows: slice) -> tuple[slice, _Pass, list[_Leg]]:
            part = _Pass(self.remote_model, extras.rows(rows.start, rows.stop))
            outputs[rows], legs = await part.forward(hidden[rows], self.start, self.end)
            return rows, part, legs

        passes = self._shared.run(_at_once([partial(one, rows) for rows in _parts(hidden)]))
        return outputs.to(device), passes

    def _backward(self, passes: _Passes, grad: torch.Tensor) -> torch.Tensor:
        device, grad = grad.device, grad.detach().cpu()
        inputs_grad = torch.empty_like(grad)

        async def one(rows: slice, part: _Pass, legs: list[_Leg]) -> None:
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
