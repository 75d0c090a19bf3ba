"""Forward and backward passes of one part of a batch, through whatever servers there are."""

from __future__ import annotations

import time
from collections.abc import Mapping, MutableSequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lilliput.client.costs import PASSES
from lilliput.client.recovery import Recovery
from lilliput.client.remote import RemoteModel
from lilliput.client.route import Hop
from lilliput.errors import LilliputError, MissingBlocks, Unreachable
from lilliput.wire import lilliput_pb2 as pb
from lilliput.wire.protocol import BACKWARD, FORWARD


@dataclass(frozen=True)
class Extras:
    """What goes along with the hidden states of one part. Shapes as in `lilliput.proto`."""

    start: int
    mask: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None
    prompts: torch.Tensor | None = None

    def of(self, hop: Hop) -> dict[str, torch.Tensor]:
        prompts = None if self.prompts is None else self.prompts[hop.start - self.start : hop.end - self.start]
        tensors = {"mask": self.mask, "position_ids": self.position_ids, "prompts": prompts}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    def rows(self, begin: int, end: int) -> Extras:
        mask = self.mask if self.mask is None or self.mask.shape[0] == 1 else self.mask[begin:end]
        ids = None if self.position_ids is None else self.position_ids[begin:end]
        return Extras(self.start, mask, ids, None if self.prompts is None else self.prompts[:, begin:end])


@dataclass(frozen=True)
class PassLeg:
    """One server's share of a forward pass, with the inputs it had: all that its backward pass needs."""

    hop: Hop
    inputs: torch.Tensor


@dataclass(frozen=True)
class _Lost:
    """A server that failed, and the peers that have computed some of its blocks since."""

    hop: Hop
    why: str
    since: float
    new: list[str] = field(default_factory=list)


class Pass:
    """Forward and backward of one part of a batch through whatever servers there are.

    When a server fails, the others are asked; `patience.attempts` bounds how often.

    :param recoveries: are told about servers that others took the places of
    """

    def __init__(self, remote: RemoteModel, extras: Extras, recoveries: MutableSequence[Recovery]) -> None:
        self._remote, self._extras, self._recoveries = remote, extras, recoveries
        self._failures = 0
        self._lost: list[_Lost] = []
        self._banned: set[str] = set()
        self._last_error: LilliputError | None = None

    async def forward(self, hidden: torch.Tensor, start: int, end: int) -> tuple[torch.Tensor, list[PassLeg]]:
        legs: list[PassLeg] = []
        while start < end:
            for hop in await self._chain(start, end):
                try:
                    output = await self._ask(hop, FORWARD, {"hidden": hidden})
                except LilliputError as e:
                    self._failed(hop, e)
                    break
                legs.append(PassLeg(hop, hidden))
                hidden, start = output, hop.end
        return hidden, legs

    async def backward(self, legs: list[PassLeg], grad: torch.Tensor) -> torch.Tensor:
        for leg in reversed(legs):
            grad = await self._backward_leg(leg, grad)
        return grad

    async def _backward_leg(self, leg: PassLeg, grad: torch.Tensor) -> torch.Tensor:
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
            raise Unreachable("it returned something else than was asked for", hop.peer_id)
        if call == FORWARD and not bool(torch.isfinite(output).all()):
            raise Unreachable("it returned what are not finite numbers", hop.peer_id)
        self._computed(hop, hidden.shape[1])
        return output.to(hidden.dtype)

    def _computed(self, hop: Hop, tokens: int) -> None:
        for lost in [lost for lost in self._lost if hop.start < lost.hop.end and lost.hop.start < hop.end]:
            lost.new.append(hop.peer_id)
            if hop.end >= lost.hop.end:
                self._lost.remove(lost)
                blocks, seconds = (lost.hop.start, lost.hop.end), time.monotonic() - lost.since
                self._recoveries.append(
                    Recovery(*blocks, lost.hop.peer_id, tuple(lost.new), lost.why, seconds, tokens, tokens)
                )

    def _failed(self, hop: Hop, error: LilliputError) -> None:
        error.args = (f"server {hop}: {error}", *error.args[1:])
        self._failures += 1
        if not error.retry_elsewhere or self._failures >= self._remote.patience.attempts:
            raise error
        self._last_error = error
        self._lost.append(_Lost(hop, str(error), time.monotonic()))
        self._banned.add(hop.peer_id)
        if isinstance(error, Unreachable):
            self._remote.connection.ban(hop.peer_id)
