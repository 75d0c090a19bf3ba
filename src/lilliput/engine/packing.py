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
        step, part = s.step, slice(s.step.offset, s.step.offset + s.tokens)
        hidden.append(step.hidden[:, part].reshape(s.count, -1))
        if step.prompts is not None:
            values = step.prompts[:, :, part].reshape(step.prompts.shape[0], s.count, -1).to(dtype)
            prompts.append(Prompts(total, values))
        total += s.count
    places: dict[int, Places] = {}
    tables = ordered[0].session.tables
    for window in {table.group.window for table in tables}:
        alike = [number for number, table in enumerate(tables) if table.group.window == window]
        for number, here in zip(alike, _places(single, several, alike, page_size).of_each_table(), strict=True):
            places.update(dict.fromkeys(tables[number].group.blocks, here))
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
    """What a slice's tokens look at in some of its session's page tables, which have one window.

    :ivar start: tokens of a row before the slice's, in these pages
    :ivar pages: of each table and row, up to its last token
    """

    def __init__(self, s: Slice, numbers: Sequence[int], page_size: int) -> None:
        tables, length = [s.session.tables[number] for number in numbers], s.session.length
        first, last = tables[0].first_seen(length), (length + s.tokens - 1) // page_size
        self.slice, self.start = s, length - first * page_size
        self.pages = [[row[first - table.left : last + 1 - table.left] for row in table.rows] for table in tables]
        self.count = last + 1 - first

    @property
    def mask(self) -> torch.Tensor | None:
        """bool [rows or 1, tokens, start + tokens]"""
        step = self.slice.step
        if step.mask is None:
            return None
        mask = step.mask[:, step.offset : step.offset + self.slice.tokens]
        length = self.slice.session.length
        return mask[:, :, length - self.start : length + self.slice.tokens]


def _places(single: Sequence[Slice], several: Sequence[Slice], numbers: Sequence[int], page_size: int) -> Places:
    """Where the tokens are in the pages of the sessions' tables of these numbers, which have one window."""
    decode = [_Seen(s, numbers, page_size) for s in single]
    slots: list[torch.Tensor] = []
    if decode:
        of_tables = [
            [row[-1] * page_size + seen.start % page_size for seen in decode for row in seen.pages[table]]
            for table in range(len(numbers))
        ]
        slots.append(torch.tensor(of_tables))
    chunks = []
    for s in several:
        seen = _Seen(s, numbers, page_size)
        pages, slot = torch.tensor(seen.pages), torch.arange(seen.start, seen.start + s.tokens)
        slots.append((pages[:, :, slot // page_size] * page_size + slot % page_size).flatten(1))
        chunks.append(Chunk(s.step.rows, s.tokens, seen.start, pages, seen.mask))
    return Places(
        page_size,
        slots=torch.cat(slots, dim=1),
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
    pages: list[list[list[int]]] = [[] for _ in group[0].pages]
    lengths: list[int] = []
    for seen in group:
        padding = width - seen.count
        for of_table, rows in zip(pages, seen.pages, strict=True):
            of_table.extend(row + row[:1] * padding if padding else row for row in rows)
        lengths.extend([seen.start + 1] * seen.slice.step.rows)
    mask = None
    if any(seen.slice.step.mask is not None for seen in group):
        mask = torch.ones(len(lengths), width * page_size, dtype=torch.bool)
        first = 0
        for seen in group:
            count = seen.slice.step.rows
            if (given := seen.mask) is not None:
                mask[first : first + count, : seen.start + 1] = given[:, 0]
            first += count
    return DecodeGroup(torch.tensor(pages), torch.tensor(lengths), mask)
