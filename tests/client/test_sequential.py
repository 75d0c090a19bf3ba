"""Remote blocks as a module: outputs and gradients as of local blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lilliput import RemoteSequential
from lilliput.errors import BadRequest


def local(whole: Any, hidden: torch.Tensor, start: int, end: int, mask: torch.Tensor | None = None) -> torch.Tensor:
    positions = torch.arange(hidden.shape[1])[None]
    rotary = whole.model.rotary_emb(hidden, positions)
    visible = torch.ones(hidden.shape[1], hidden.shape[1], dtype=torch.bool).tril() if mask is None else mask
    bias = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    bias = bias[None, None] if bias.dim() == 2 else bias[:, None]
    for block in whole.model.layers[start:end]:
        hidden = block(hidden, attention_mask=bias, position_ids=positions, position_embeddings=rotary)
    return hidden


def inputs(rows: int, tokens: int) -> torch.Tensor:
    return torch.randn(rows, tokens, 64, generator=torch.Generator().manual_seed(rows * tokens))


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and bool((a - b).abs().max() <= 1e-4 * b.abs().max())


def test_runs_of_blocks_are_sliced_like_a_list(tiny: Any) -> None:
    blocks = tiny.remote
    assert isinstance(blocks, RemoteSequential)
    assert len(blocks) == 6
    assert [(b.start, b.end) for b in (blocks[1:4], blocks[2], blocks[-1], blocks[1:5][1:], blocks[:])] == [
        (1, 4), (2, 3), (5, 6), (2, 5), (0, 6),
    ]  # fmt: skip
    for wrong in (6, -7, slice(3, 3), slice(0, 6, 2)):
        with pytest.raises(IndexError):
            blocks[wrong]
    assert not list(blocks.parameters())
    assert "0:6" in repr(blocks)


@pytest.mark.parametrize("span", [(0, 6), (1, 5), (3, 4)])
def test_outputs_and_gradients_equal_local_blocks(whole: Any, tiny: Any, span: tuple[int, int]) -> None:
    mine, theirs = inputs(2, 17).requires_grad_(), inputs(2, 17).requires_grad_()
    output, expected = tiny.remote[slice(*span)](mine), local(whole, theirs, *span)
    assert close(output, expected)
    weights = torch.randn_like(expected)
    (output * weights).sum().backward()
    (expected * weights).sum().backward()
    assert mine.grad is not None
    assert theirs.grad is not None
    assert close(mine.grad, theirs.grad)


def test_a_large_batch_travels_in_parts(whole: Any, tiny: Any) -> None:
    mine, theirs = inputs(20, 64).requires_grad_(), inputs(20, 64).requires_grad_()
    output, expected = tiny.remote(mine), local(whole, theirs, 0, 6)
    assert close(output, expected)
    output.square().sum().backward()
    expected.square().sum().backward()
    assert mine.grad is not None
    assert theirs.grad is not None
    assert close(mine.grad, theirs.grad)


def test_a_mask_for_each_row(whole: Any, tiny: Any) -> None:
    hidden = inputs(3, 12)
    mask = torch.ones(12, 12, dtype=torch.bool).tril().repeat(3, 1, 1)
    mask[1, :, :4] = torch.eye(12, dtype=torch.bool)[:, :4]
    assert close(tiny.remote(hidden, mask=mask), local(whole, hidden, 0, 6, mask))


def test_training_reaches_the_embeddings(whole: Any, tiny: Any) -> None:
    ids = torch.arange(5, 25)[None]
    gradients = []
    for model in (tiny, whole):
        embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
        model(inputs_embeds=embeds, labels=ids).loss.backward()
        gradients.append(embeds.grad)
    assert close(gradients[0], gradients[1])


def test_mistakes_are_told(tiny: Any) -> None:
    for wrong in (torch.randn(5, 64), torch.randn(1, 5, 63), torch.full((1, 2, 64), float("nan"))):
        with pytest.raises(BadRequest):
            tiny.remote(wrong)
    assert tiny.remote(torch.zeros(0, 5, 64)).shape == (0, 5, 64)


def test_blocks_alone_need_no_weights(whole: Any, tiny_swarm: Any, tiny_llama: Any) -> None:
    blocks = RemoteSequential.from_pretrained(str(tiny_llama), initial_peers=tiny_swarm.initial_peers)
    assert close(blocks[2:](inputs(1, 4)), local(whole, inputs(1, 4), 2, 6))
    blocks.close()
