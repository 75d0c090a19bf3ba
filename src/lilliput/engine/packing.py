"""From the steps of a round to one packed batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lilliput.engine.session import CacheSession, Step
from lilliput.models.batch import Chunk, DecodeGroup, PackedBatch, Places, Prompts

#: rows are padded to the longest of their group; groups are cut so that padding stays below this factor
_GROUP_FACTOR = 2
#: rows of up to this many pages share a group whatever their lengths: more groups would cost more than padding
_SMALL_PAGES = 4


@dataclass
class Slice:
    """`tokens` per row of a step, from its `offset` on, in a round."""

    session: CacheSession
    step: Step
    tokens: int

    @property
    def count(self) -> int:
        return self.step.rows * self.tokens


def pack(slices: Sequence[Slice], page_size: int, dtype: torch.dtype) -> tuple[torch.Tensor, PackedBatch, list[Slice]]:
    """Hidden states [tokens, hidden], the batch, and the slices in the order of their tokens."""
    single = sorted((s for s in slices if s.tokens == 1), key=lambda s: s.session.length)
    several = [s for s in slices if s.tokens > 1]
    ordered = [*single, *several]
    hidden: list[torch.Tensor] = []
    prompts: list[Prompts] = []
    total = 0
    for s in ordered:
        step, window = s.step, slice(s.step.offset, s.step.offset + s.tokens)
        hidden.append(step.hidden[:, window].reshape(s.count, -1))
        if step.prompts is not None:
            values = step.prompts[:, :, window].reshape(step.prompts.shape[0], s.count, -1).to(dtype)
            prompts.append(Prompts(total, values))
        total += s.count
    places: dict[int, Places] = {}
    for number, table in enumerate(ordered[0].session.tables):
        here = _places(single, several, number, page_size)
        places.update(dict.fromkeys(table.group.blocks, here))
    batch = PackedBatch(_positions(single, several), places, prompts, _adapters(ordered))
    return torch.cat(hidden).to(dtype), batch, ordered


def unpack(hidden: torch.Tensor, ordered: Sequence[Slice]) -> list[torch.Tensor]:
    """Each slice's outputs, [rows, tokens, hidden]."""
    parts = hidden.split([s.count for s in ordered])
    return [part.view(s.step.rows, s.tokens, -1) for part, s in zip(parts, ordered, strict=True)]


def looks_ahead(mask: torch.Tensor, start: int) -> bool:
    """Whether a mask [rows, tokens, start + tokens] lets a token attend to a later one."""
    tokens = mask.shape[1]
    later = torch.ones(tokens, start + tokens, dtype=torch.bool).triu(start + 1)
    return bool((mask & later).any())


def attend_to_self(mask: torch.Tensor, start: int) -> torch.Tensor:
    """A token that may attend to nothing (padding) attends to itself: its output is never used, but must be finite,
    since others' zero weights are multiplied with its values."""
    empty = ~mask.any(dim=-1)
    if not bool(empty.any()):
        return mask
    own = torch.eye(mask.shape[1], dtype=torch.bool)
    return torch.cat([mask[..., :start], mask[..., start:] | (own & empty[..., None])], dim=-1)


def _positions(single: Sequence[Slice], several: Sequence[Slice]) -> torch.Tensor:
    # Rows with one token, of which there may be many, are plain numbers until all are known: few operations a round.
    numbers: list[int] = []
    for s in single:
        ids = s.step.position_ids
        numbers.extend(ids[:, s.step.offset].tolist() if ids is not None else [s.session.length] * s.step.rows)
    positions = [torch.tensor(numbers)] if single else []
    for s in several:
        step, length = s.step, s.session.length
        if step.position_ids is not None:
            positions.append(step.position_ids[:, step.offset : step.offset + s.tokens].reshape(-1).long())
        else:
            positions.append(torch.arange(length, length + s.tokens).repeat(step.rows))
    return torch.cat(positions)


def _adapters(ordered: Sequence[Slice]) -> list[tuple[str, torch.Tensor | None]]:
    """Which tokens use which adapter; see `PackedBatch`."""
    names = {s.session.adapter for s in ordered}
    if len(names) == 1:
        return [(name, None) for name in names if name]
    places: dict[str, list[int]] = {}
    offset = 0
    for s in ordered:
        places.setdefault(s.session.adapter, []).extend(range(offset, offset + s.count))
        offset += s.count
    return [(name, torch.tensor(where)) for name, where in places.items() if name]


class _Seen:
    """What a slice's tokens look at in one of its session's page tables.

    :ivar start: tokens of a row before the slice's, in these pages
    :ivar pages: of each row, up to its last token
    """

    def __init__(self, s: Slice, number: int, page_size: int) -> None:
        table, length = s.session.tables[number], s.session.length
        first = table.first_seen(length)
        count = (length + s.tokens - 1) // page_size + 1 - table.left
        self.slice, self.start = s, length - first * page_size
        self.pages = [row[first - table.left : count] for row in table.rows]

    @property
    def count(self) -> int:
        return len(self.pages[0])

    @property
    def mask(self) -> torch.Tensor | None:
        """bool [rows or 1, tokens, start + tokens]"""
        step = self.slice.step
        if step.mask is None:
            return None
        mask = step.mask[:, step.offset : step.offset + self.slice.tokens]
        length = self.slice.session.length
        return mask[:, :, length - self.start : length + self.slice.tokens]


def _places(single: Sequence[Slice], several: Sequence[Slice], number: int, page_size: int) -> Places:
    """Where the tokens are in the pages of the sessions' tables of that number."""
    decode = [_Seen(s, number, page_size) for s in single]
    slots: list[torch.Tensor] = []
    if decode:
        places = [row[-1] * page_size + seen.start % page_size for seen in decode for row in seen.pages]
        slots.append(torch.tensor(places))
    chunks = []
    for s in several:
        seen = _Seen(s, number, page_size)
        pages, slot = torch.tensor(seen.pages), torch.arange(seen.start, seen.start + s.tokens)
        slots.append((pages[:, slot // page_size] * page_size + slot % page_size).reshape(-1))
        chunks.append(Chunk(s.step.rows, s.tokens, seen.start, pages, seen.mask))
    return Places(
        page_size,
        slots=torch.cat(slots),
        decode=[_decode_group(group, page_size) for group in _groups(decode)],
        chunks=chunks,
    )


def _groups(decode: Sequence[_Seen]) -> list[list[_Seen]]:
    groups: list[list[_Seen]] = []
    smallest = 0
    for seen in decode:  # by about growing number of pages
        if groups and seen.count <= max(_SMALL_PAGES, _GROUP_FACTOR * smallest):
            groups[-1].append(seen)
        else:
            groups.append([seen])
            smallest = seen.count
    return groups


def _decode_group(group: Sequence[_Seen], page_size: int) -> DecodeGroup:
    width = max(seen.count for seen in group)
    pages: list[list[int]] = []
    lengths: list[int] = []
    for seen in group:
        padding = width - seen.count
        pages.extend(row + row[:1] * padding if padding else row for row in seen.pages)
        lengths.extend([seen.start + 1] * len(seen.pages))
    mask = None
    if any(seen.slice.step.mask is not None for seen in group):
        mask = torch.ones(len(pages), width * page_size, dtype=torch.bool)
        first = 0
        for seen in group:
            if (given := seen.mask) is not None:
                mask[first : first + len(seen.pages), : seen.start + 1] = given[:, 0]
            first += len(seen.pages)
    return DecodeGroup(torch.tensor(pages), torch.tensor(lengths), mask)
