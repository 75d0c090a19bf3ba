"""Forward and backward passes without caches, cut into short units that take turns with inference rounds."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field

import torch

from lilliput.engine.packing import attend_to_self
from lilliput.engine.session import as_finite, bring
from lilliput.errors import BadRequest, LilliputError
from lilliput.models.span import Span

#: rows are taken together up to about so many tokens: enough for full speed, little enough memory for activations
_TOKENS_AT_ONCE = 1024


@dataclass(eq=False)
class Pass:
    """One forward (`grad` is None) or backward pass over blocks `[start, end)`.

    :ivar hidden: [rows, tokens, hidden]; `mask`, `position_ids`, `prompts` as in `Span.dense`
    :ivar grad: of the outputs, like `hidden`
    :ivar adapter: that its tokens use; empty: none
    :ivar done: called once, from the engine's thread, with the outputs (or gradients of the inputs), or an error
    :ivar given_up: nobody waits for it any more: `done` need not be called
    """

    start: int
    end: int
    hidden: torch.Tensor
    grad: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None
    prompts: torch.Tensor | None = None
    adapter: str = ""
    done: Callable[[torch.Tensor | LilliputError], None] = field(default=lambda result: None)
    given_up: bool = False

    def to(self, device: torch.device) -> None:
        """Bring its tensors to a device."""
        bring(self, ("hidden", "grad", "mask", "position_ids", "prompts"), device)


def check_pass(job: Pass, hidden_size: int, dtype: torch.dtype) -> None:
    """Raise `BadRequest` if the tensors do not fit each other, or hold more than numbers of the span's `dtype`."""
    hidden = job.hidden
    if hidden.dim() != 3 or hidden.shape[-1] != hidden_size or 0 in hidden.shape:
        raise BadRequest(f"hidden states must be [rows, tokens, {hidden_size}], not {list(hidden.shape)}")
    rows, tokens, _ = hidden.shape
    for name, tensor in (("hidden states", hidden), ("gradients", job.grad), ("prompts", job.prompts)):
        if tensor is None:
            continue
        if not tensor.is_floating_point():
            raise BadRequest(f"the {name} must be floating-point numbers, not {tensor.dtype}")
        as_finite(tensor, dtype, name)
    if job.grad is not None and job.grad.shape != hidden.shape:
        raise BadRequest(f"gradients must be {list(hidden.shape)} like the hidden states, not {list(job.grad.shape)}")
    if job.mask is not None and job.mask.dim() == 2:
        job.mask = job.mask[None]
    if job.mask is not None and (
        job.mask.dtype != torch.bool or tuple(job.mask.shape) not in ((rows, tokens, tokens), (1, tokens, tokens))
    ):
        raise BadRequest(f"the mask must be bool [{rows} or 1, {tokens}, {tokens}], not {list(job.mask.shape)}")
    if job.mask is not None:
        job.mask = attend_to_self(job.mask, 0)
    if job.position_ids is not None and (
        tuple(job.position_ids.shape) != (rows, tokens)
        or job.position_ids.dtype not in (torch.int64, torch.int32)
        or int(job.position_ids.min()) < 0
        or int(job.position_ids.max()) >= 1 << 31
    ):
        raise BadRequest(f"position_ids must be int64 [{rows}, {tokens}], 0 or more and below 2^31")
    wanted = (job.end - job.start, rows, tokens, hidden_size)
    if job.prompts is not None and tuple(job.prompts.shape) != wanted:
        raise BadRequest(f"prompts must be {list(wanted)}, not {list(job.prompts.shape)}")


def units(job: Pass, span: Span) -> Generator[None, None, torch.Tensor]:
    """Run a pass, pausing after every block. The generator's return value is the result, [rows, tokens, hidden]."""
    rows = max(1, _TOKENS_AT_ONCE // job.hidden.shape[1])
    parts: list[torch.Tensor] = []
    for first in range(0, job.hidden.shape[0], rows):
        part = slice(first, first + rows)
        run = _backward if job.grad is not None else _forward
        parts.append((yield from run(job, span, part)))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _through(job: Pass, span: Span, part: slice, block: int, hidden: torch.Tensor) -> torch.Tensor:
    mask = job.mask if job.mask is None or job.mask.shape[0] == 1 else job.mask[part]
    prompts = (
        None if job.prompts is None else job.prompts[block - job.start : block - job.start + 1, part].to(span.dtype)
    )
    positions = None if job.position_ids is None else job.position_ids[part].long()
    return span.dense(hidden, block, block + 1, mask=mask, position_ids=positions, prompts=prompts, adapter=job.adapter)


def _forward(job: Pass, span: Span, part: slice) -> Generator[None, None, torch.Tensor]:
    hidden = job.hidden[part].to(span.dtype)
    for block in range(job.start, job.end):
        with torch.inference_mode():
            hidden = _through(job, span, part, block, hidden)
        yield
    return hidden


def _backward(job: Pass, span: Span, part: slice) -> Generator[None, None, torch.Tensor]:
    # The forward pass is run again: a server keeps nothing for a client that may never come back.
    hidden = job.hidden[part].to(span.dtype)
    steps: list[tuple[torch.Tensor, torch.Tensor]] = []
    for block in range(job.start, job.end):
        with torch.enable_grad():
            inputs = hidden.detach().requires_grad_()
            hidden = _through(job, span, part, block, inputs)
        steps.append((inputs, hidden))
        yield
    assert job.grad is not None
    grad = job.grad[part].to(span.dtype)
    while steps:
        inputs, outputs = steps.pop()
        (grad,) = torch.autograd.grad(outputs, inputs, grad)
        del inputs, outputs
        yield
    return grad
