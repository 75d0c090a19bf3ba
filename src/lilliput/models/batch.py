"""A packed batch: tokens of many sessions side by side, and where each one's keys and values lie.

The tokens of all sessions form one sequence `[tokens, hidden]`, so projections and MLPs run once over all of them; only
attention looks at rows. Rows that bring one token each come first (`decode`), in groups of similar length; the others
follow as chunks.

A block's cache is one tensor `[pages, 2 * kv_heads, page_size, head_dim]`, keys' heads before values'. With a head's
tokens next to each other inside a page, the keys and values of many rows are gathered by one `index_select` into the
layout that batched products want. Between two pages of a block lie those of the other blocks that share its page table.

Blocks with a window are told of the pages only that they look at: lengths and masks count from the first of these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch


@dataclass
class DecodeGroup:
    """Rows with one new token each, padded to the same number of pages."""

    #: [tables, rows, pages] page ids; what lies beyond a row's length is any page of the pool
    pages: torch.Tensor
    #: [rows] tokens per row in these pages, after this step
    lengths: torch.Tensor
    #: bool [rows, pages * page_size], True = attend; None = all up to the length
    mask: torch.Tensor | None = None


@dataclass
class Chunk:
    """Several new tokens for each of one session's rows."""

    rows: int
    tokens: int
    #: tokens per row in these pages before this step
    start: int
    #: [tables, rows, pages] page ids, enough for start + tokens
    pages: torch.Tensor
    #: bool [rows or 1, tokens, start + tokens], True = attend; None = causal
    mask: torch.Tensor | None = None


@dataclass
class Prompts:
    """Deep prompts: added to the inputs of every block, for a slice of the packed tokens."""

    offset: int
    #: [blocks of the request, tokens, hidden]
    values: torch.Tensor


@dataclass
class Places:
    """Where the tokens of a batch are in the pages of one group of blocks. Order: decode groups, then chunks.

    Groups that look equally far back differ in page ids only. So what is computed from these is computed for all of
    them at once, and each has its `table` of it.
    """

    page_size: int
    #: int64 [tables, tokens]: page * page_size + offset, where each token's keys and values go
    slots: torch.Tensor
    decode: list[DecodeGroup] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    table: int = 0
    _memo: dict[object, torch.Tensor] = field(default_factory=dict, repr=False)
    _of_tables: dict[object, tuple[torch.Tensor, ...]] = field(default_factory=dict, repr=False)

    def of_each_table(self) -> list[Places]:
        """These, as each of the tables has them."""
        return [replace(self, table=table) for table in range(len(self.slots))]

    def write_index(self, heads: int, apart: int) -> torch.Tensor:
        """int64 [tokens, heads]: slots of a pool seen as `[slots, head_dim]`.

        :param apart: heads from a page's first one to the next page's
        """
        key = ("write", heads, apart)
        if key not in self._of_tables:
            page, offset = self.slots // self.page_size, self.slots % self.page_size
            head = torch.arange(heads)
            index = (page[..., None] * apart + head) * self.page_size + offset[..., None]
            self._of_tables[key] = index.unbind()
        return self._of_tables[key][self.table]

    def gather_index(self, pages: torch.Tensor, heads: int, apart: int) -> torch.Tensor:
        """int64 [2 * rows * heads * pages]: heads of a pool seen as `[heads, page_size * head_dim]`.

        The order is keys then values, then row, head, page. `apart` as in `write_index`.
        """
        key = ("gather", id(pages), heads, apart)
        if key not in self._of_tables:
            side = torch.arange(2).view(2, 1, 1, 1) * heads
            head = torch.arange(heads).view(1, 1, heads, 1)
            index = pages[:, None, :, None, :] * apart + side + head
            self._of_tables[key] = index.reshape(len(pages), -1).unbind()
        return self._of_tables[key][self.table]

    def decode_bias(self, group: DecodeGroup, heads: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """[rows * heads, 1, pages * page_size]: 0 where a row attends, the dtype's lowest elsewhere."""
        key = ("bias", id(group), heads, window, dtype)
        if key not in self._memo:
            slot = torch.arange(group.pages.shape[2] * self.page_size)
            last = group.lengths[:, None] - 1
            allowed = slot <= last
            if group.mask is not None:
                allowed = allowed & group.mask
            if window is not None:
                allowed &= slot > last - window
            bias = torch.zeros(allowed.shape, dtype=dtype).masked_fill_(~allowed, torch.finfo(dtype).min)
            self._memo[key] = bias.repeat_interleave(heads, dim=0)[:, None]
        return self._memo[key]

    def chunk_mask(self, chunk: Chunk, window: int | None) -> torch.Tensor:
        """bool [rows or 1, tokens, start + tokens], True = attend."""
        key = ("mask", id(chunk), window)
        if key not in self._memo:
            query = torch.arange(chunk.start, chunk.start + chunk.tokens)[:, None]
            slot = torch.arange(chunk.start + chunk.tokens)
            allowed = chunk.mask if chunk.mask is not None else (slot <= query)[None]
            if window is not None:
                allowed = allowed & (slot > query - window)
            self._memo[key] = allowed
        return self._memo[key]


@dataclass
class PackedBatch:
    """Everything the blocks must know about the tokens they get."""

    #: int64 [tokens]
    position_ids: torch.Tensor
    #: by the block's number; blocks that share pages share them
    places: Mapping[int, Places]
    prompts: list[Prompts] = field(default_factory=list)
    #: names of adapters, each with the places of its tokens, int64; None: all of them use it
    adapters: list[tuple[str, torch.Tensor | None]] = field(default_factory=list)
