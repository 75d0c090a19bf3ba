"""A span of blocks, ready to compute: the model with holes, its attention over the paged cache.

Two ways through the blocks. *Paged*: packed tokens of many sessions with their caches, for inference. *Dense*: whole
rows without caches, differentiable, for training and scoring. Either runs any part `[start, end)` of the span.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lilliput.errors import MissingAdapter, ModelError, UnsupportedModel
from lilliput.models import attention, quantization
from lilliput.models.adapters import read_adapter
from lilliput.models.attention import AttentionShape
from lilliput.models.batch import Chunk, PackedBatch, Places
from lilliput.models.call import ATTENTION, Call, SpanBlock, Trial, calling, listen, packed_prompt
from lilliput.models.families import adapt
from lilliput.models.fused import FusedBlock, rotary_tables, try_fuse
from lilliput.models.holes import base_of, blocks_of, keep_span, load_with_holes
from lilliput.models.lora import Adapter, Deltas, deltas_of
from lilliput.models.memory import giving_back
from lilliput.models.paged_cache import Group, PagedCache, Pools, divide
from lilliput.models.sources import ModelFiles

CPU = torch.device("cpu")
#: a trial run decides whether a fused block equals the family's own: the median error relative to the median output.
#: (Medians, since one enormous activation, which some models have, would drown all others.)
_TRIAL_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 5e-3}
#: trial inputs are small, so that what a block adds is not lost in rounding the sum
_TRIAL_SCALE = 0.02
#: far above all rounding through many blocks, far below what it makes to mistake one row for another
_PACKING_TOLERANCE = 0.25
#: blocks are read in parts of so many bytes, or one by one if a block is larger
_PART_BYTES = 32 << 20


class Span:
    """Blocks `[start, end)` of a model.

    :ivar shapes: what each block asks of its attention, by block number
    :ivar groups: blocks that share a page table of the cache
    :ivar fused: whether the blocks run as `FusedBlock`s or as the family's own modules
    :ivar adapters: those that were added, by name
    """

    def __init__(
        self,
        model: PreTrainedModel,
        start: int,
        end: int,
        *,
        cache_dtype: torch.dtype | None = None,
        device: torch.device = CPU,
        fuse: bool = True,
    ) -> None:
        self._base: Any = base_of(model)
        self.device = device
        self.start, self.end = start, end
        self.dtype: torch.dtype = model.dtype
        self.cache_dtype = cache_dtype or self.dtype
        self.config = self._base.config
        self.hidden_size: int = self.config.hidden_size
        blocks = blocks_of(model)
        self._list_name = next(name for name, child in self._base.named_children() if child is blocks)
        self._layers = {index: dict(_linear_layers(blocks[index])) for index in range(start, end)}
        self._listening: set[tuple[int, str]] = set()
        self.adapters: dict[str, Adapter] = {}
        with self.on_device():
            adapt(self._base, list(blocks)[start:end])
        for index in range(start, end):
            blocks[index] = SpanBlock(blocks[index], index)
        self._fused: dict[int, FusedBlock] | None = None
        self.shapes: dict[int, AttentionShape] = {}
        with self.on_device():
            self._try_out(blocks, fuse)
        self.groups = divide({i: (shape.window, self._cache_numbers(shape)) for i, shape in self.shapes.items()})

    @classmethod
    def load(
        cls,
        files: ModelFiles,
        start: int,
        end: int,
        *,
        dtype: torch.dtype,
        quantize: str | None = None,
        cache_dtype: torch.dtype | None = None,
        device: torch.device = CPU,
        fuse: bool = True,
    ) -> Span:
        """Read blocks `[start, end)` of a model's files, and nothing else.

        :param quantize: None, or one of `quantization.KINDS`: the weights of linear layers
        :param cache_dtype: `dtype` by default, or int8, with a scale for each head and token
        :param device: that computes. Blocks come to it part by part, so the machine's memory need not hold them all.
        """
        quantization.check(quantize, device)

        def read(start: int, end: int) -> PreTrainedModel:
            part, punch = (start, end), keep_span(start, end)
            return load_with_holes(files, AutoModel, punch, part, dtype=dtype, attention=ATTENTION)

        with giving_back():
            model = _read_in_parts(read, start, end, quantize, device)
            return cls(model, start, end, cache_dtype=cache_dtype, device=device, fuse=fuse)

    @property
    def fused(self) -> bool:
        return self._fused is not None

    def on_device(self) -> AbstractContextManager[object]:
        """In here, in this thread, tensors are made on the span's device unless another is named."""
        return nullcontext() if self.device == CPU else self.device

    def add_adapter(self, name: str, folder: str | Path) -> None:
        """Read a LoRA adapter in PEFT's format, for these blocks only. Raises `ModelError`."""
        if name in self.adapters:
            raise ModelError(f"two adapters are called {name}")
        blocks: Any = blocks_of(self._base)
        adapter = read_adapter(name, folder, self._layers, blocks=len(blocks), lists=self._list_name, dtype=self.dtype)
        adapter.to(self.device)
        self.adapters[name] = adapter
        if self._fused is not None:
            return
        for place in {(index, path) for index, paths in adapter.layers.items() for path in paths} - self._listening:
            index, path = place
            listen(blocks[index].block.get_submodule(path), index, path)
            self._listening.add(place)

    def check_adapter(self, name: str) -> None:
        """Raise `MissingAdapter` unless it was added, or none is named."""
        if name and name not in self.adapters:
            known = f"it has {', '.join(sorted(self.adapters))}" if self.adapters else "it has none"
            raise MissingAdapter(f"this server has no adapter {name!r}; {known}")

    def _deltas(self, batch: PackedBatch) -> Deltas | None:
        return deltas_of((self.adapters[name], places) for name, places in batch.adapters)

    def groups_of(self, start: int, end: int) -> list[Group]:
        """What of `groups` is in blocks `[start, end)`."""
        parts = [Group(tuple(i for i in group.blocks if start <= i < end), group.window) for group in self.groups]
        return [part for part in parts if part.blocks]

    @property
    def cache_bytes_per_token(self) -> int:
        """Bytes of attention cache for one token of one row through the whole span."""
        return sum(map(self._cache_numbers, self.shapes.values())) * self.cache_dtype.itemsize

    def _cache_numbers(self, shape: AttentionShape) -> int:
        return 2 * shape.kv_heads * attention.slot_width(shape, self.cache_dtype)

    def new_cache(self, pages: int, page_size: int, *, divided: bool = True) -> PagedCache:
        """An attention cache.

        :param divided: a page holds tokens for one of `groups`; else for all blocks
        """
        groups = self.groups if divided else [Group(tuple(self.shapes))]
        with self.on_device():
            return PagedCache(self.shapes, groups, pages=pages, page_size=page_size, dtype=self.cache_dtype)

    @torch.inference_mode()
    def paged(self, hidden: torch.Tensor, batch: PackedBatch, pools: Pools, start: int, end: int) -> torch.Tensor:
        """Packed tokens through blocks `[start, end)`: [tokens, hidden] -> [tokens, hidden]."""
        deltas = self._deltas(batch)
        if self._fused is None:
            call = Call(start, end, batch=batch, pools=pools, deltas=deltas)
            return self._through_family(hidden[None], batch.position_ids[None], call)[0]
        tables = self._tables(hidden[None], batch.position_ids[None], packed=True)
        for index in range(start, end):
            prompt = packed_prompt(batch, index - start, hidden) if batch.prompts else None
            hidden = self._fused[index].paged(hidden, tables, pools[index], batch.places[index], prompt, deltas)
        return hidden

    def dense(
        self,
        hidden: torch.Tensor,
        start: int,
        end: int,
        *,
        mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        prompts: torch.Tensor | None = None,
        adapter: str = "",
    ) -> torch.Tensor:
        """Whole rows through blocks `[start, end)` without a cache, differentiable in `hidden` and `prompts`.

        :param hidden: [rows, tokens, hidden]
        :param mask: bool [rows or 1, tokens, tokens], True = attend; default causal
        :param position_ids: int64 [rows, tokens]; default 0, 1, 2, ...
        :param prompts: [blocks, rows or 1, tokens, hidden], added to the inputs of each block
        :param adapter: the name of one that was added
        """
        deltas = deltas_of([(self.adapters[adapter], None)] if adapter else [])
        if position_ids is None:
            position_ids = torch.arange(hidden.shape[1])[None].expand(hidden.shape[0], -1)
        if self._fused is None:
            call = Call(start, end, mask=mask, prompts=prompts, deltas=deltas)
            return self._through_family(hidden, position_ids, call)
        tables = self._tables(hidden, position_ids)
        for index in range(start, end):
            if prompts is not None:
                hidden = hidden + prompts[index - start]
            hidden = self._fused[index].dense(hidden, tables, mask, deltas)
        return hidden

    def _through_family(self, hidden: torch.Tensor, position_ids: torch.Tensor, call: Call) -> torch.Tensor:
        call.hidden = hidden
        with calling(call):
            self._base(inputs_embeds=hidden, position_ids=position_ids, use_cache=False)
        return call.hidden

    def _tables(self, hidden: torch.Tensor, position_ids: torch.Tensor, packed: bool = False) -> Any:
        with torch.no_grad():
            cos, sin = self._base.rotary_emb(hidden, position_ids)
            return rotary_tables(cos[0], sin[0]) if packed else rotary_tables(cos, sin)

    def _try_out(self, blocks: nn.ModuleList, fuse: bool) -> None:
        """Run a few tokens through the family's blocks: learn their attention's shape, try the fused ones on them.

        Raises `UnsupportedModel` if the family means something that would be computed otherwise.
        """
        random = torch.randn(2, 5, self.hidden_size, device=CPU, generator=torch.Generator().manual_seed(0))
        hidden = (random * _TRIAL_SCALE).to(self.device, self.dtype)
        positions = torch.tensor([[0, 1, 2, 3, 4], [3, 4, 5, 6, 7]])
        call = Call(self.start, self.end, recorded=self.shapes, trials={})
        with torch.no_grad():
            try:
                output = self._through_family(hidden, positions, call)
                if set(self.shapes) != set(range(self.start, self.end)):
                    raise UnsupportedModel("it does not reach its attention through transformers' attention interface")
            except UnsupportedModel as e:
                raise UnsupportedModel(f"{type(self._base).__name__} cannot be served: {e}") from None
            # `s_aux` is a parameter of the block itself: keep it as it is, without its history
            self.shapes = {
                i: replace(s, sinks=s.sinks.detach() if s.sinks is not None else None) for i, s in self.shapes.items()
            }
            if fuse and hasattr(self._base, "rotary_emb"):
                self._fused = self._fuse(blocks, call)
        if self._fused is not None:
            for index in range(self.start, self.end):
                blocks[index] = nn.Identity()
                self._fused[index].pack()
        self._check_packing(hidden, positions, output)

    def _check_packing(self, hidden: torch.Tensor, positions: torch.Tensor, expected: torch.Tensor) -> None:
        """Rows packed into one sequence must come out as side by side: only attention may know of neighbours."""
        rows, tokens, _ = hidden.shape
        pages = torch.arange(rows)[None, :, None]
        places = Places(tokens, torch.arange(rows * tokens)[None], chunks=[Chunk(rows, tokens, 0, pages)])
        batch = PackedBatch(positions.reshape(-1), dict.fromkeys(self.shapes, places))
        pools = self.new_cache(rows, tokens, divided=False).blocks
        got = self.paged(hidden.flatten(0, 1), batch, pools, self.start, self.end)
        error, size = (
            (got.view_as(hidden) - expected).abs().float().median(),
            (expected - hidden).abs().float().median(),
        )
        if not bool(error <= _PACKING_TOLERANCE * size):
            name = type(self._base).__name__
            raise UnsupportedModel(f"{name} cannot be served: its blocks know of a token's neighbours beside attention")

    def _fuse(self, blocks: nn.ModuleList, call: Call) -> dict[int, FusedBlock] | None:
        """All blocks fused, or None if one of them computes something else."""
        fused: dict[int, FusedBlock] = {}
        activation = str(getattr(self.config, "hidden_act", ""))
        assert call.trials is not None
        for index, trial in call.trials.items():
            wrapped: Any = blocks[index]
            block = try_fuse(wrapped.block, self.shapes[index], activation, index)
            if block is None or not _agrees(block, trial, _TRIAL_TOLERANCE.get(self.dtype, 1e-2)):
                return None
            fused[index] = block
        return fused


def _linear_layers(block: nn.Module) -> Iterator[tuple[str, tuple[int, int]]]:
    """The paths of a block's linear layers, whatever keeps their weights, with how many in- and outputs they have."""
    for path, module in block.named_modules():
        sizes = getattr(module, "in_features", None), getattr(module, "out_features", None)
        if isinstance(module, Conv1D):  # GPT-2's, a linear layer with its weight transposed
            sizes = module.nx, module.nf
        if isinstance(sizes[0], int) and isinstance(sizes[1], int):
            yield path, (sizes[0], sizes[1])


def _read_in_parts(
    read: Callable[[int, int], PreTrainedModel], start: int, end: int, quantize: str | None, device: torch.device
) -> PreTrainedModel:
    """Blocks `[start, end)`, of which only a few at a time are there as their files have them."""
    model = read(start, start + 1)
    blocks = blocks_of(model)
    size = sum(parameter.nbytes for parameter in blocks[start].parameters())
    many = max(1, _PART_BYTES // max(1, size))
    model.to(device)  # type: ignore[arg-type]
    if quantize is not None:
        quantization.quantize(blocks[start], quantize)
    for begin in range(start + 1, end, many):
        part = blocks_of(read(begin, min(begin + many, end)))
        for index in range(begin, min(begin + many, end)):
            blocks[index] = part[index].to(device)
            if quantize is not None:
                quantization.quantize(blocks[index], quantize)
    return model


def _agrees(block: FusedBlock, trial: Trial, tolerance: float) -> bool:
    rotary = trial.rotary
    if not (isinstance(rotary, tuple) and len(rotary) == 2 and isinstance(trial.output, torch.Tensor)):
        return False
    if rotary[0].shape[-1] != block.shape.key_dim:
        return False  # rotates only a part of each head
    tables = rotary_tables(*rotary)

    def near(got: torch.Tensor, expected: torch.Tensor, base: torch.Tensor | float) -> bool:
        error, size = (got - expected).abs().float().median(), (expected - base).abs().float().median()
        return bool(error <= tolerance * size)  # False for NaN

    attended = block.attend(trial.hidden, tables, None)
    return near(attended, trial.attended.reshape(attended.shape), 0.0) and near(
        block.dense(trial.hidden, tables, None), trial.output, trial.hidden
    )
