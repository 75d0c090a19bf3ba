"""What a server can hold, and how fast it is, before it knows which blocks it will hold."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lilliput.engine.engine import Engine
from lilliput.engine.probe import throughput
from lilliput.errors import ModelError
from lilliput.models.facts import ModelFacts
from lilliput.models.machine import device_called, memory_of
from lilliput.models.plan import blocks_that_fit
from lilliput.models.sample import sample_span
from lilliput.models.sources import ModelFiles, resolve
from lilliput.models.span import CPU
from lilliput.server.loading import DTYPES
from lilliput.server.options import ServerOptions
from lilliput.swarm.node import Node
from lilliput.swarm.records import ServerRecord

logger = logging.getLogger(__name__)

#: of the memory that is free; the rest is for others
_MEMORY_SHARE = 0.8
#: room for so much attention cache is left where it is not told how much (tokens)
_LEAST_CACHE_TOKENS = 8192
_SAMPLE_PAGES, _PAGE_SIZE = 16, 32


@dataclass(frozen=True)
class Outlook:
    """:ivar length: how many blocks the server is to hold
    :ivar model_blocks: of the whole model
    :ivar block_rate: tokens a second through one block, of several streams together; None if it could not be measured
    """

    files: ModelFiles
    model_blocks: int
    length: int
    block_rate: float | None

    def record(self, node: Node, options: ServerOptions, addresses: Sequence[str], started_at: float) -> ServerRecord:
        """What such a server says of itself; the span in it is any."""
        return ServerRecord(
            peer_id=str(node.peer_id),
            model=self.files.name,
            name=options.name,
            fingerprint=self.files.fingerprint,
            model_blocks=self.model_blocks,
            start=0,
            end=self.length,
            state="joining",
            dtype=options.precision,
            started_at=started_at,
            addresses=tuple(addresses),
        )


def survey(model: str | ModelFiles, options: ServerOptions, progress: Callable[[str], None]) -> Outlook:
    """See what fits into memory, and time a block with made-up weights. Takes seconds, and no network for it.

    Raises `ModelError`, also if not one block fits.
    """
    progress("finding the model")
    files = model if isinstance(model, ModelFiles) else resolve(model, weights=False)
    facts = files.facts()
    progress("measuring this machine")
    length = options.num_blocks or _fitting(facts, options)
    return Outlook(files, len(facts.blocks), min(length, len(facts.blocks)), _block_rate(files, options))


def _fitting(facts: ModelFacts, options: ServerOptions) -> int:
    memory = int(memory_of(device_called(options.device))[0] * _MEMORY_SHARE)
    fitting = blocks_that_fit(
        facts, options.dtype, options.quantize, memory, options.cache_tokens or _LEAST_CACHE_TOKENS
    )
    if not fitting:
        raise ModelError(
            f"not one block of {facts.name} fits into the {memory / 1e9:.1f} GB of memory that may be used here; "
            "free some, or use fewer cache tokens"
        )
    return fitting


def _block_rate(files: ModelFiles, options: ServerOptions) -> float | None:
    try:
        device = device_called(options.device)
        span = sample_span(files, dtype=DTYPES[options.dtype], quantize=options.quantize, device=device)
        turns = device == CPU and not options.threads
        engine = Engine(span, pages=_SAMPLE_PAGES, page_size=_PAGE_SIZE, take_turns=turns)
        engine.start()
        try:
            throughput(engine)  # the first time is not like the others
            return throughput(engine)
        finally:
            engine.stop()
            gc.collect()
    except Exception as e:  # whatever a family's code stumbles over; what is loaded later is measured again
        logger.info("could not measure a block of %s: %s", files.name, e)
        return None
