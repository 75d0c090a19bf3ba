"""From a model's name to a span of its blocks that computes."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch

from lilliput.engine.engine import Engine
from lilliput.engine.probe import measure
from lilliput.errors import ModelError
from lilliput.models.holes import read_config
from lilliput.models.memory import keep_freed_memory
from lilliput.models.sources import ModelFiles, resolve
from lilliput.models.span import Span
from lilliput.server.admission import Admission
from lilliput.server.options import ServerOptions
from lilliput.server.service import Service

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_PAGE_SIZE = 32
#: by default the cache may take this share of the memory that is free when the blocks are loaded
_CACHE_SHARE = 0.25
_MOST_CACHE_TOKENS = 1 << 18


@dataclass(frozen=True)
class Loaded:
    """:ivar model_blocks: of the whole model"""

    files: ModelFiles
    model_blocks: int
    service: Service


def load(
    model: str | ModelFiles, blocks: tuple[int, int], options: ServerOptions, progress: Callable[[str], None]
) -> Loaded:
    """Read blocks `[start, end)` and start an engine for them, which is the caller's to stop. Raises `ModelError`."""
    start, end = blocks
    progress("finding the model")
    files = model if isinstance(model, ModelFiles) else resolve(model)
    config = read_config(files)
    count = int(config.num_hidden_layers)
    if not 0 <= start < end <= count:
        raise ModelError(f"{files.name} has blocks 0:{count}; {start}:{end} is no part of them")
    if options.threads:
        torch.set_num_threads(options.threads)
    keep_freed_memory()
    progress(f"reading blocks {start}:{end}")
    span = Span.load(
        files,
        start,
        end,
        dtype=DTYPES[options.dtype],
        quantize=options.quantize,
        cache_dtype=torch.int8 if options.cache_dtype == "int8" else None,
    )
    cache_tokens = options.cache_tokens or _default_cache_tokens(span)
    pages = max(1, cache_tokens // _PAGE_SIZE)
    made_for = int(getattr(config, "max_position_embeddings", 0) or 0) or pages * _PAGE_SIZE
    max_length = options.max_length or min(made_for, pages * _PAGE_SIZE)
    engine = Engine(span, pages=pages, page_size=_PAGE_SIZE, take_turns=not options.threads)
    engine.start()
    progress("measuring")
    measure(engine)
    gc.collect()
    gc.freeze()  # what is loaded stays; collections need not look at it
    service = Service(
        model=files.name,
        span=span,
        engine=engine,
        admission=Admission(
            pages=pages,
            page_size=_PAGE_SIZE,
            max_length=min(max_length, pages * _PAGE_SIZE),
            max_queue=options.max_queue,
            max_sessions_per_peer=options.max_sessions_per_peer,
        ),
        max_step_tokens=options.max_step_tokens,
        first_step_seconds=options.first_step_seconds,
        idle_seconds=options.idle_seconds,
        share_prefixes=options.share_prefixes,
    )
    return Loaded(files, count, service)


def _default_cache_tokens(span: Span) -> int:
    import psutil

    free = psutil.virtual_memory().available * _CACHE_SHARE
    return max(1024, min(_MOST_CACHE_TOKENS, int(free // max(1, span.cache_bytes_per_token))))
