"""From the steps of a round to one packed batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lilliput.engine.session import CacheSession, Step
from lilliput.models.batch import Chunk, DecodeGroup, PackedBatch, Prompts

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
    single = sorted((s for s in slices if s.tokens == 1), key=lambda s: len(s.session.rows[0].pages))
    several = [s for s in slices if s.tokens > 1]
    ordered = [*single, *several]
    hidden: list[torch.Tensor] = []
    prompts: list[Prompts] = []
    # Rows with one token, of which there may be many, are plain numbers until all are known: few operations a round.
    positions, slots = _decode_places(single, page_size)
    total = 0
    for s in ordered:
        step, window = s.step, slice(s.step.offset, s.step.offset + s.tokens)
        hidden.append(step.hidden[:, window].reshape(s.count, -1))
        if step.prompts is not None:
            values = step.prompts[:, :, window].reshape(step.prompts.shape[0], s.count, -1).to(dtype)
            prompts.append(Prompts(total, values))
        total += s.count
    for s in several:
        step, session = s.step, s.session
        slot = torch.arange(session.length, session.length + s.tokens)
        if step.position_ids is not None:
            positions.append(step.position_ids[:, step.offset : step.offset + s.tokens].reshape(-1).long())
        else:
            positions.append(slot.repeat(step.rows))
        pages = _pages_of(session, session.length + s.tokens, page_size)
        slots.append((pages[:, slot // page_size] * page_size + slot % page_size).reshape(-1))
    batch = PackedBatch(
        page_size=page_size,
        position_ids=torch.cat(positions),
        slots=torch.cat(slots),
        decode=[_decode_group(group, page_size) for group in _groups(single, page_size)],
        chunks=[_chunk(s, page_size) for s in several],
        prompts=prompts,
        adapters=_adapters(ordered),
    )
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


def _decode_places(single: Sequence[Slice], page_size: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Positions and slots of the rows with one token, each as at most one tensor in a list."""
    if not single:
        return [], []
    positions: list[int] = []
    slots: list[int] = []
    for s in single:
        length = s.session.length
        page, offset = length // page_size, length % page_size
        slots.extend(row.pages[page] * page_size + offset for row in s.session.rows)
        ids = s.step.position_ids
        positions.extend(ids[:, s.step.offset].tolist() if ids is not None else [length] * s.step.rows)
    return [torch.tensor(positions)], [torch.tensor(slots)]


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


def _pages_of(session: CacheSession, length: int, page_size: int) -> torch.Tensor:
    count = -(-length // page_size)
    return torch.tensor([row.pages[:count] for row in session.rows])


def _groups(single: Sequence[Slice], page_size: int) -> list[list[Slice]]:
    groups: list[list[Slice]] = []
    smallest = 0
    for s in single:  # by growing number of pages
        pages = s.session.length // page_size + 1
        if groups and pages <= max(_SMALL_PAGES, _GROUP_FACTOR * smallest):
            groups[-1].append(s)
        else:
            groups.append([s])
            smallest = pages
    return groups


def _decode_group(group: Sequence[Slice], page_size: int) -> DecodeGroup:
    width = max(s.session.length // page_size + 1 for s in group)
    pages, lengths = [], []
    for s in group:
        padding = width - len(s.session.rows[0].pages)
        for row in s.session.rows:
            pages.append(row.pages + row.pages[:1] * padding if padding else row.pages)
        lengths.extend([s.session.length + 1] * s.step.rows)
    mask = None
    if any(s.step.mask is not None for s in group):
        mask = torch.ones(len(pages), width * page_size, dtype=torch.bool)
        first = 0
        for s in group:
            if s.step.mask is not None:
                length = s.session.length + 1
                mask[first : first + s.step.rows, :length] = s.step.mask[:, s.step.offset, :length]
            first += s.step.rows
    return DecodeGroup(torch.tensor(pages), torch.tensor(lengths), mask)


def _chunk(s: Slice, page_size: int) -> Chunk:
    step, start = s.step, s.session.length
    mask = None
    if step.mask is not None:
        mask = step.mask[:, step.offset : step.offset + s.tokens, : start + s.tokens]
    return Chunk(step.rows, s.tokens, start, _pages_of(s.session, start + s.tokens, page_size), mask)
