"""The attention cache of a span: one tensor of pages, and which blocks share them.

A page holds the keys and values of some tokens for one *group* of blocks, all of which look equally far back. So where
some blocks of a span have windows and others have none, those give the pages behind their window back, and these keep
theirs. Pages of all groups are of one size and come from one pool: however long sessions are, no memory is set aside
for one kind of blocks that another could use. (The idea is that of vLLM's hybrid cache manager.)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from lilliput.models.attention import AttentionShape, slot_width

#: the cache of each block: [pages, 2 * kv_heads, page_size, slot width]
Pools = dict[int, torch.Tensor]

#: of the pages that a session takes if nothing is given back, so many are taken to be kept where there are windows
_KEPT_BY_WINDOWS = 0.25
#: a page table more is worth it if it saves this share of the cache: a step must look at each of them
_TABLE_COST = 0.01


@dataclass(frozen=True)
class Group:
    """Blocks that share pages.

    :ivar window: how many tokens they look back, the token itself among them; None: all
    """

    blocks: tuple[int, ...]
    window: int | None = None


def divide(blocks: Mapping[int, tuple[int | None, int]]) -> tuple[Group, ...]:
    """A span's blocks in groups of about the same size, so that little of their pages is left empty.

    :param blocks: by number: its window, and numbers in the cache for a token
    """
    kinds: dict[int | None, list[int]] = {}
    for block, (window, _) in sorted(blocks.items()):
        kinds.setdefault(window, []).append(block)
    largest = {window: max(blocks[block][1] for block in kind) for window, kind in kinds.items()}

    def parts(size: int) -> dict[int | None, int]:
        """Into how many groups of at most so many numbers each kind is divided."""
        return {window: -(-len(kind) // (size // largest[window])) for window, kind in kinds.items()}

    def cost(size: int) -> float:
        into = parts(size)
        pages = sum(count * (1 if window is None else _KEPT_BY_WINDOWS) for window, count in into.items())
        return size * pages * (1 + _TABLE_COST * sum(into.values()))

    sizes = {count * largest[window] for window, kind in kinds.items() for count in range(1, len(kind) + 1)}
    into = parts(min((size for size in sizes if size >= max(largest.values())), key=lambda size: (cost(size), -size)))
    groups = [Group(part, window) for window, kind in kinds.items() for part in _cut(kind, into[window])]
    return tuple(sorted(groups, key=lambda group: group.blocks))


def _cut(blocks: Sequence[int], parts: int) -> Iterator[tuple[int, ...]]:
    ends = [number * len(blocks) // parts for number in range(parts + 1)]
    return (tuple(blocks[first:last]) for first, last in itertools.pairwise(ends))


class PagedCache:
    """So many pages of `page_size` tokens. The system gives it memory as they are first used.

    :param shapes: of the blocks' attention
    :ivar blocks: each block's part of all pages, [pages, 2 * kv_heads, page_size, slot width]; keys' heads come first
    """

    def __init__(
        self,
        shapes: Mapping[int, AttentionShape],
        groups: Sequence[Group],
        *,
        pages: int,
        page_size: int,
        dtype: torch.dtype,
    ) -> None:
        widths = {slot_width(shape, dtype) for shape in shapes.values()}
        places: dict[int, int] = {}
        taken = 0
        for group in groups:
            at = 0
            for block in group.blocks:
                width = slot_width(shapes[block], dtype)
                places[block] = at = -(-at // width) * width  # a block's slots are counted from the pool's beginning
                at += 2 * shapes[block].kv_heads * width
            taken = max(taken, at)
        even = math.lcm(*widths)
        page = -(-taken // even) * even * page_size
        self._pages = torch.empty(pages, page, dtype=dtype)
        self.blocks: Pools = {}
        for block, shape in shapes.items():
            width = slot_width(shape, dtype)
            size = pages, 2 * shape.kv_heads, page_size, width
            self.blocks[block] = self._pages.as_strided(
                size, (page, page_size * width, width, 1), places[block] * page_size
            )

    @property
    def nbytes(self) -> int:
        return self._pages.nbytes

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Make the second page of each pair equal to the first."""
        source, target = torch.tensor(pairs).T
        self._pages[target] = self._pages[source]

    def clear(self, pages: Sequence[int]) -> None:
        """Fill pages with zeros."""
        self._pages.index_fill_(0, torch.tensor(pages), 0)

    def clear_behind(self, page: int, slot: int, group: Group) -> None:
        """Fill the slots of a group's page with zeros, from `slot` on."""
        for block in group.blocks:
            self.blocks[block][page, :, slot:] = 0
