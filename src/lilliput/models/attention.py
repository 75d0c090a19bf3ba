"""Attention over a packed batch and its paged cache, or over plain rows without a cache.

One function serves every family that reaches its attention through transformers' `AttentionInterface`, and the fused
blocks. It honours what families hand over: scaling, sliding windows, soft caps, attention sinks, fewer key heads than
query heads, values narrower than keys, biases of keys by their place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from lilliput.models.batch import Chunk, DecodeGroup, Places

#: from a number of keys to float32 biases `[heads, keys]` by a key's place, added to its scaled scores
KeyBias = Callable[[int], torch.Tensor]


@dataclass(frozen=True)
class AttentionShape:
    """What a family's block asks of its attention, as recorded from the block itself."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    key_bias: KeyBias | None = None

    @property
    def cache_dim(self) -> int:
        """Width of a cache slot: keys and values share one tensor."""
        return max(self.key_dim, self.value_dim)

    @property
    def plain(self) -> bool:
        return self.softcap is None and self.sinks is None and self.key_bias is None


#: queries that are taken at a time
_TILE = 64


#: a slot of an int8 cache ends with its scale, a float32
_SCALE_BYTES = 4


def slot_width(shape: AttentionShape, dtype: torch.dtype) -> int:
    """Numbers of a cache's dtype that one token's keys, or values, of one head take. Zeros are zeros in every dtype."""
    return shape.cache_dim + (_SCALE_BYTES if dtype == torch.int8 else 0)


def write(pool: torch.Tensor, places: Places, key: torch.Tensor, value: torch.Tensor) -> None:
    """Put new keys `[tokens, kv_heads, key_dim]` and values into their slots.

    :param pool: a block's cache, as in `PagedCache.blocks`
    """
    if key.shape[-1] != value.shape[-1]:
        width = max(key.shape[-1], value.shape[-1])
        key, value = (F.pad(x, (0, width - x.shape[-1])) for x in (key, value))
    write_joined(pool, places, torch.cat([key, value], dim=1))


def write_joined(pool: torch.Tensor, places: Places, both: torch.Tensor) -> None:
    """Put keys and values, `[tokens, 2 * kv_heads, cache_dim]` with keys' heads first, into their slots."""
    if pool.dtype == torch.int8:
        both = _to_int8(both)
    pages, heads, page_size, width = pool.shape
    apart = pool.stride(0) // pool.stride(1)
    slots = pool.as_strided((((pages - 1) * apart + heads) * page_size, width), (width, 1))
    slots[places.write_index(heads, apart)] = both


def _to_int8(values: torch.Tensor) -> torch.Tensor:
    """[..., dim] -> int8 [..., dim + _SCALE_BYTES], each with a scale of its own."""
    values = values.float()
    scales = values.abs().amax(dim=-1, keepdim=True).clamp_(min=1e-30) / 127
    return torch.cat([(values / scales).round_().to(torch.int8), scales.view(torch.int8)], dim=-1)


def _from_int8(slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What `_to_int8` was given, but for rounding."""
    scales = slots[..., -_SCALE_BYTES:].contiguous().view(torch.float32)
    return slots[..., :-_SCALE_BYTES].to(dtype).mul_(scales.to(dtype))


def paged(query: torch.Tensor, pool: torch.Tensor, places: Places, shape: AttentionShape) -> torch.Tensor:
    """Attend to the cache. The batch's own keys and values must have been written.

    :param query: [tokens, heads, key_dim]
    :returns: [tokens, heads, value_dim]
    """
    parts: list[torch.Tensor] = []
    offset = 0
    for group in places.decode:
        rows = len(group.lengths)
        parts.append(_decode(query[offset : offset + rows], pool, places, group, shape))
        offset += rows
    for chunk in places.chunks:
        count = chunk.rows * chunk.tokens
        parts.append(_chunk(query[offset : offset + count], pool, places, chunk, shape))
        offset += count
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def dense(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, shape: AttentionShape
) -> torch.Tensor:
    """Attend without a cache, differentiably.

    :param query, key, value: [rows, heads or kv_heads, tokens, dim]
    :param mask: bool [rows or 1, tokens, tokens], True = attend; None = causal
    :returns: [rows, tokens, heads, value_dim]
    """
    rows, heads, tokens, _ = query.shape
    given = mask
    if mask is None and shape.window is not None and shape.window < tokens:
        position = torch.arange(tokens)
        mask = (position <= position[:, None])[None]
    if mask is not None and shape.window is not None:
        position = torch.arange(tokens)
        mask = mask & (position > position[:, None] - shape.window)
    grouped = query.reshape(rows, shape.kv_heads, heads // shape.kv_heads, tokens, -1)
    out = _attend(grouped, key[:, :, None], value[:, :, None], mask, shape, causal=given is None)
    return out.reshape(rows, heads, tokens, -1).transpose(1, 2)


def _gather(
    pool: torch.Tensor, places: Places, pages: torch.Tensor, shape: AttentionShape, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of some rows, in `dtype`: two of [rows * kv_heads, pages * page_size, dim]."""
    count, heads, page_size, width = pool.shape
    size, apart = page_size * width, pool.stride(0) // pool.stride(1)
    all_heads = pool.as_strided(((count - 1) * apart + heads, size), (size, 1))
    index = places.gather_index(pages, shape.kv_heads, apart)
    both = all_heads.index_select(0, index).view(2, pages.shape[1] * shape.kv_heads, -1, width)
    if pool.dtype == torch.int8:
        both = _from_int8(both, dtype)
    key, value = both[0], both[1]
    if shape.key_dim != shape.value_dim:
        key, value = key[..., : shape.key_dim], value[..., : shape.value_dim]
    return key, value


def _decode(
    query: torch.Tensor, pool: torch.Tensor, places: Places, group: DecodeGroup, shape: AttentionShape
) -> torch.Tensor:
    # Grouped queries are folded into the batch: two batched products per block, whatever the number of rows.
    rows = query.shape[0]
    key, value = _gather(pool, places, group.pages, shape, query.dtype)
    bias = places.decode_bias(group, shape.kv_heads, shape.window, query.dtype)
    folded = query.reshape(rows * shape.kv_heads, -1, shape.key_dim)
    if shape.plain:
        scores = torch.baddbmm(bias, folded, key.transpose(1, 2), alpha=shape.scaling)
        weights = torch.softmax(scores, dim=-1)
    else:
        scores = torch.bmm(folded, key.transpose(1, 2)).view(rows, shape.kv_heads, -1, 1, key.shape[1])
        weights = _weights(scores, bias.view(rows, shape.kv_heads, 1, 1, -1), shape).view(*folded.shape[:2], -1)
    return torch.bmm(weights, value).view(rows, shape.heads, shape.value_dim)


def _chunk(
    query: torch.Tensor, pool: torch.Tensor, places: Places, chunk: Chunk, shape: AttentionShape
) -> torch.Tensor:
    length = chunk.start + chunk.tokens
    key, value = _gather(pool, places, chunk.pages, shape, query.dtype)
    key, value = (x[:, :length].view(chunk.rows, shape.kv_heads, 1, length, -1) for x in (key, value))
    grouped = query.view(chunk.rows, chunk.tokens, shape.kv_heads, -1, shape.key_dim).permute(0, 2, 3, 1, 4)
    windowed = shape.window is not None and shape.window < length
    mask = places.chunk_mask(chunk, shape.window) if chunk.mask is not None or windowed else None
    out = _attend(grouped, key, value, mask, shape, causal=chunk.mask is None)
    return out.permute(0, 3, 1, 2, 4).reshape(chunk.rows * chunk.tokens, shape.heads, shape.value_dim)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    shape: AttentionShape,
    *,
    causal: bool,
) -> torch.Tensor:
    """[rows, kv_heads, group, tokens, key_dim] against [rows, kv_heads, 1, length, dim].

    The queries are the last tokens of the keys.

    :param mask: bool [rows or 1, tokens, length], True = attend; None: all up to the query itself
    :param causal: nothing attends to what comes after it, whatever the mask
    """
    if not shape.plain:
        return _attend_by_weights(query, key, value, mask, shape, causal=causal)
    if torch.is_grad_enabled() and query.requires_grad:
        return _attend_at_once(query, key, value, mask, shape)
    return _attend_in_tiles(query, key, value, mask, shape, causal=causal)


def _attend_by_weights(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    shape: AttentionShape,
    *,
    causal: bool,
) -> torch.Tensor:
    """What no fused kernel computes: soft caps, sinks, biases of keys. A few queries at a time, and differentiable."""
    tokens, length = query.shape[3], key.shape[3]
    parts = []
    for begin in range(0, tokens, _TILE):
        stop = min(begin + _TILE, tokens)
        first = length - tokens + begin
        last = length - tokens + stop if causal else length
        lowest = max(0, first - shape.window + 1) if causal and shape.window is not None else 0
        if mask is not None:
            allowed = mask[:, begin:stop, lowest:last]
        else:
            allowed = torch.ones(1, stop - begin, last - lowest, dtype=torch.bool).tril(first - lowest)
        bias = torch.zeros(allowed.shape, dtype=query.dtype).masked_fill_(~allowed, torch.finfo(query.dtype).min)
        scores = query[:, :, :, begin:stop] @ key[:, :, :, lowest:last].transpose(-1, -2)
        parts.append(_weights(scores, bias[:, None, None], shape, lowest) @ value[:, :, :, lowest:last])
    return torch.cat(parts, dim=3)


def _attend_at_once(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, shape: AttentionShape
) -> torch.Tensor:
    """By torch's fused kernel, which is differentiable. No mask: as many keys as queries, causal."""
    rows, kv_heads, group, tokens, _ = query.shape
    flat, length = rows * kv_heads, key.shape[3]
    # one batch entry per (row, kv head): the kernel takes keys with a zero stride over the group
    q = query.reshape(flat, group, tokens, -1)
    k, v = (x.reshape(flat, 1, length, -1).expand(flat, group, length, -1) for x in (key, value))
    if mask is not None:
        mask = mask[:, None].expand(mask.shape[0], kv_heads if mask.shape[0] > 1 else 1, tokens, length)
        mask = mask.reshape(-1, 1, tokens, length)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=shape.scaling)
    return out.view(rows, kv_heads, group, tokens, -1)


def _attend_in_tiles(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    shape: AttentionShape,
    *,
    causal: bool,
) -> torch.Tensor:
    """A few queries at a time, so that their scores stay in the processor's cache, and only the keys before them.

    torch's fused kernel computes what a causal mask hides, too. In 16 bits two plain products are faster than its inner
    loop; in float32 they are not. (512 queries, 1,024 keys, one core: 17 ms fused, 9 ms so.)
    """
    rows, kv_heads, group, tokens, _ = query.shape
    flat, length = rows * kv_heads, key.shape[3]
    q = query.reshape(flat, group, tokens, -1)
    k, v = key.reshape(flat, length, -1), value.reshape(flat, length, -1)
    out = torch.empty(flat, group, tokens, v.shape[-1], dtype=query.dtype)
    for begin in range(0, tokens, _TILE):
        stop = min(begin + _TILE, tokens)
        count, first = stop - begin, length - tokens + begin
        last = first + count if causal else length
        lowest = max(0, first - shape.window + 1) if causal and shape.window is not None else 0
        if mask is not None:
            allowed = mask[:, begin:stop, lowest:last]
        else:
            allowed = torch.ones(1, count, last - lowest, dtype=torch.bool).tril(last - lowest - count)
        if allowed.shape[0] > 1:
            allowed = allowed[:, None].expand(rows, kv_heads, *allowed.shape[1:]).reshape(flat, *allowed.shape[1:])
        keys, values = k[:, lowest:last], v[:, lowest:last]
        if query.dtype == torch.float32:
            out[:, :, begin:stop] = F.scaled_dot_product_attention(
                q[:, :, begin:stop],
                keys[:, None].expand(-1, group, -1, -1),
                values[:, None].expand(-1, group, -1, -1),
                attn_mask=allowed[:, None],
                scale=shape.scaling,
            )
            continue
        tile = q[:, :, begin:stop].reshape(flat, group * count, -1)
        scores = torch.baddbmm(tile.new_empty(1), tile, keys.transpose(1, 2), beta=0, alpha=shape.scaling)
        scores = scores.view(flat, group, count, -1)
        if mask is None:  # only the tile itself has anything to hide
            hidden = ~allowed[:, None, :, -count:]
            scores[..., -count:].masked_fill_(hidden, torch.finfo(scores.dtype).min)
        else:
            scores.masked_fill_(~allowed[:, None], torch.finfo(scores.dtype).min)
        weights = torch.softmax(scores, dim=-1).view(flat, group * count, -1)
        out[:, :, begin:stop] = torch.bmm(weights, values).view(flat, group, count, -1)
    return out.view(rows, kv_heads, group, tokens, -1)


def _weights(scores: torch.Tensor, bias: torch.Tensor, shape: AttentionShape, first: int = 0) -> torch.Tensor:
    """Softmax with a soft cap, sinks and biases of keys.

    :param scores: unscaled, [rows, kv_heads, group, tokens, length]
    :param bias: 0 or the dtype's lowest, [rows or 1, kv_heads or 1, 1, tokens, length]
    :param first: place of the first key
    """
    scores = scores * shape.scaling
    if shape.softcap is not None:
        scores = torch.tanh(scores / shape.softcap) * shape.softcap
    scores = (scores + bias).float()
    if shape.key_bias is not None:
        keys = scores.shape[-1]
        scores = scores + shape.key_bias(first + keys)[:, first:].reshape(shape.kv_heads, -1, 1, keys)
    if shape.sinks is None:
        return torch.softmax(scores, dim=-1).to(bias.dtype)
    column = shape.sinks.float().view(shape.kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1].to(bias.dtype)
