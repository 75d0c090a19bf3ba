"""From a model's name to a span of its blocks that computes."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from lilliput.engine.engine import Engine
from lilliput.engine.probe import measure
from lilliput.engine.table import kept_tokens
from lilliput.errors import ModelError
from lilliput.models.adapters import check_adapter
from lilliput.models.holes import read_config
from lilliput.models.machine import device_called, memory_of
from lilliput.models.sources import ModelFiles, resolve
from lilliput.models.span import CPU, Span
from lilliput.server.admission import Admission, longest_row
from lilliput.server.options import ServerOptions
from lilliput.server.service import Service

T = TypeVar("T")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_PAGE_SIZE = 32
#: by default the cache may take this share of the memory that is free when the blocks are loaded
_CACHE_SHARE = 0.25
_MOST_CACHE_TOKENS = 1 << 18
#: where blocks have windows, a session is promised its window and a step: longer ones than this bring nothing
_WINDOWED_STEP = 1024


@dataclass(frozen=True)
class Loaded:
    """
    :ivar model_blocks: of the whole model
    :ivar throughput: tokens per second through the span when several streams come together
    """

    files: ModelFiles
    model_blocks: int
    service: Service
    throughput: float


def load(
    model: str | ModelFiles, blocks: tuple[int, int], options: ServerOptions, progress: Callable[[str], None]
) -> Loaded:
    """Read blocks `[start, end)` and start an engine for them, which is the caller's to stop. Raises `ModelError`."""
    start, end = blocks
    device = device_called(options.device)
    progress("finding the model")
    files = model if isinstance(model, ModelFiles) else resolve(model, weights=False)
    config = read_config(files)
    count = int(config.num_hidden_layers)
    if not 0 <= start < end <= count:
        raise ModelError(f"{files.name} has blocks 0:{count}; {start}:{end} is no part of them")
    files.fetch(blocks, lambda stage, done, total: progress(stage))
    for name, folder in options.adapters.items():
        check_adapter(name, folder)  # before the blocks are read, which takes longer
    if options.threads:
        torch.set_num_threads(options.threads)
    progress(f"reading blocks {start}:{end}")
    with _enough_memory(f"blocks {start}:{end} of {files.name}"):
        span = Span.load(
            files,
            start,
            end,
            dtype=DTYPES[options.dtype],
            quantize=options.quantize,
            cache_dtype=torch.int8 if options.cache_dtype == "int8" else None,
            device=device,
        )
        for name, folder in options.adapters.items():
            progress(f"reading the adapter {name}")
            span.add_adapter(name, folder)
        pages = _cache_pages(span, options.cache_tokens)
        engine = Engine(span, pages=pages, page_size=_PAGE_SIZE, take_turns=device == CPU and not options.threads)
    engine.start()
    progress("measuring")
    throughput = measure(engine)
    gc.collect()
    gc.freeze()  # what is loaded stays; collections need not look at it
    max_step = options.max_step_tokens
    if any(group.window for group in span.groups):
        max_step = min(max_step, _WINDOWED_STEP)
    service = Service(
        model=files.name,
        span=span,
        engine=engine,
        admission=Admission(
            pages=engine.pool.count,
            page_size=_PAGE_SIZE,
            max_length=_max_length(span, engine, max_step, config, options),
            groups=len(span.groups),
            max_queue=options.max_queue,
            max_sessions_per_peer=options.max_sessions_per_peer,
            peer_share=options.peer_share,
            fair_seconds=options.fair_seconds,
        ),
        max_step_tokens=max_step,
        first_step_seconds=options.first_step_seconds,
        idle_seconds=options.idle_seconds,
        unused_seconds=options.unused_seconds,
        share_prefixes=options.share_prefixes,
    )
    return Loaded(files, count, service, throughput)


def _max_length(span: Span, engine: Engine, step: int, config: Any, options: ServerOptions) -> int:
    """Tokens per row that sessions may ask for. With windows, that may be more than the cache holds in all blocks."""
    pages = engine.pool.count
    longest = longest_row(max(1, int(pages * options.peer_share)), kept_tokens(span.groups, step), _PAGE_SIZE)
    made_for = int(getattr(config, "max_position_embeddings", 0) or 0) or pages // len(span.groups) * _PAGE_SIZE
    wanted = options.max_length or made_for
    return wanted if longest is None else max(1, min(wanted, longest))


def clear_away() -> None:
    """Free what is left of a span that was held before. All that is alive is looked at, which takes half a second."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def _cache_pages(span: Span, tokens: int | None) -> int:
    """For a cache of so many tokens in all blocks, or of what fits. Raises `ModelError`."""
    free, total = memory_of(span.device)
    page = span.new_cache(1, _PAGE_SIZE).nbytes * len(span.groups)
    if tokens is None:
        fitting = int(free * _CACHE_SHARE) // page * _PAGE_SIZE
        tokens = max(1024, min(_MOST_CACHE_TOKENS, fitting))
    pages = max(1, tokens // _PAGE_SIZE)
    if pages * page > total:
        raise ModelError(
            f"a cache for {tokens:,} tokens of these blocks takes {pages * page / 2**30:,.1f} GiB, {span.device} has "
            f"{total / 2**30:,.1f}: give fewer --cache-tokens, or none for what fits"
        )
    return pages


@contextlib.contextmanager
def _enough_memory(what: str) -> Iterator[None]:
    try:
        yield
    except (MemoryError, RuntimeError) as e:
        lacking = isinstance(e, MemoryError | torch.cuda.OutOfMemoryError)
        if not lacking and "allocate memory" not in str(e):  # as torch says it of the machine's own
            raise
        raise ModelError(
            f"there is not enough memory for {what} and a cache; serve fewer blocks, or --quantize them, or give fewer "
            f"--cache-tokens (`lilliput plan` says what fits)"
        ) from e


async def in_thread(function: Callable[[], T]) -> T:
    """Run in a thread that does not keep the process alive (unlike an executor's), so Ctrl-C works while loading."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def resolve(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = function()
        except BaseException as e:
            error = e
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(resolve, result, error)

    threading.Thread(target=run, name="loading", daemon=True).start()
    return await future
