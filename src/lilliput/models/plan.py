"""How much of a model fits where: arithmetic on plain records, without a look at files or at this machine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

from lilliput.errors import ModelError
from lilliput.models.facts import DTYPE_BYTES, BlockFacts, ModelFacts

#: by the name of a quantization: bytes a number, numbers that share a scale (0: a matrix's whole row), bytes a scale
#: with its zero point (nf4's has none; other devices than the processor keep it in 4 bytes)
_QUANTIZED = {"int8": (1.0, 0, 4), "int4": (0.5, 32, 4), "nf4": (0.5, 32, 2)}
#: what a server takes besides: Python, torch, transformers, the p2p daemon, kernels' buffers
PROCESS_BYTES = 900 << 20
#: tokens that a server takes in one pass (the default of `serve`'s max_step_tokens)
_PASS_TOKENS = 4096
#: tokens that a block with a window keeps beside it: a step, and some that may be rolled back (engine, server)
_BESIDE_WINDOW = 1024 + 64


def block_bytes(block: BlockFacts, dtype: str, quantize: str | None = None) -> int:
    """Memory of one block's weights. Raises `ModelError` for a precision that is none."""
    full = _bytes_of(dtype)
    if quantize is None:
        return (block.matrices + block.others) * full
    if quantize not in _QUANTIZED:
        raise ModelError(f"unknown quantization {quantize!r}; known are {', '.join(_QUANTIZED)}")
    each, group, scale = _QUANTIZED[quantize]
    scales = -(-block.matrices // group) if group else block.rows
    return round(block.matrices * each) + scales * scale + block.others * full


def cache_bytes(block: BlockFacts, dtype: str) -> int:
    """Attention cache of one token of one row in one block."""
    return block.cache * _bytes_of(dtype)


def kept_share(block: BlockFacts, context: int | None) -> float:
    """Of a row of `context` tokens, how much a block keeps in its cache: 1, unless it has a window. None: of no row."""
    if block.window is None or context is None:
        return 1.0
    return min(1.0, (block.window + _BESIDE_WINDOW) / context)


def cache_share(facts: ModelFacts, context: int) -> float:
    """`kept_share` of all blocks together."""
    return sum(b.cache * kept_share(b, context) for b in facts.blocks) / sum(b.cache for b in facts.blocks)


def working_bytes(facts: ModelFacts, dtype: str) -> int:
    """What a server needs besides blocks and cache once it runs: the process, and the activations of its largest pass.

    While it loads, the largest tensor takes the place of the activations.
    """
    full = _bytes_of(dtype)
    activations = _PASS_TOKENS * (6 * facts.hidden_size + 2 * facts.inner_size) * full
    return PROCESS_BYTES + max(activations, max(block.largest for block in facts.blocks) * full)


def blocks_that_fit(
    facts: ModelFacts,
    dtype: str,
    quantize: str | None,
    memory_bytes: int,
    cache_tokens: int,
    context: int | None = None,
) -> int:
    """How many blocks of a model, whichever, a server with so much memory can hold: 0 to all of them.

    :param dtype: of the activations, the cache, and the weights unless they are quantized
    :param quantize: None, int8, int4 or nf4
    :param memory_bytes: for the whole server process and its daemon
    :param cache_tokens: of attention cache, over all rows of all sessions
    :param context: tokens of each of these rows, of which blocks with windows need not keep all; None: keep them
    """
    room = memory_bytes - working_bytes(facts, dtype)
    # blocks may differ (dense layers among experts): the largest must fit, since it is not known which they will be
    sizes = sorted(
        (
            block_bytes(b, dtype, quantize) + cache_tokens * cache_bytes(b, dtype) * kept_share(b, context)
            for b in facts.blocks
        ),
        reverse=True,
    )
    return sum(total <= room for total in accumulate(sizes))


def _bytes_of(dtype: str) -> int:
    if dtype not in DTYPE_BYTES:
        raise ModelError(f"unknown dtype {dtype!r}; known are {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]


@dataclass(frozen=True)
class Precision:
    """How a model is held. `quantize` None: weights in `dtype`."""

    name: str
    dtype: str
    quantize: str | None = None


PRECISIONS = (
    Precision("float32", "float32"),
    Precision("bfloat16", "bfloat16"),
    Precision("int8", "bfloat16", "int8"),
    Precision("int4", "bfloat16", "int4"),
    Precision("nf4", "bfloat16", "nf4"),
)


@dataclass(frozen=True)
class Machine:
    """One of the machines among which a model is divided.

    :ivar memory_bytes: that a server may use
    :ivar bytes_a_second: at which it reads its memory
    """

    memory_bytes: int
    bytes_a_second: float


@dataclass(frozen=True)
class Estimate:
    """What comes of a precision.

    :ivar block_bytes: weights of the largest block
    :ivar cache_bytes_per_token: on average over a row of so many tokens as were asked for
    :ivar blocks_fit: on one machine, cache included
    :ivar machines: that hold the whole model; None if not one block fits
    :ivar spread: over how many machines the rest is computed
    :ivar compute_ms: one token through all blocks, as reading their weights takes
    :ivar network_ms: one token over all legs of the chain
    """

    precision: str
    block_bytes: int
    model_bytes: int
    cache_bytes_per_token: int
    blocks_fit: int
    machines: int | None
    spread: int | None
    compute_ms: float
    network_ms: float | None

    @property
    def network_share(self) -> float | None:
        """Of a step's time, 0 to 1."""
        return None if self.network_ms is None else self.network_ms / (self.network_ms + self.compute_ms)


def estimate(
    facts: ModelFacts,
    precision: Precision,
    machine: Machine,
    *,
    cache_tokens: int,
    round_trip_ms: float,
    machines: int | None = None,
    context: int | None = None,
) -> Estimate:
    """How many such machines hold the model, and what a step costs over so many (or over `machines`).

    A chain of k servers that push to each other has k + 1 legs, each half a round trip long. A step reads all weights
    that its token needs, once; other work is left out, so its real share is larger and the network's smaller.
    """
    dtype, quantize = precision.dtype, precision.quantize
    fit = blocks_that_fit(facts, dtype, quantize, machine.memory_bytes, cache_tokens, context)
    needed = -(-len(facts.blocks) // fit) if fit else None
    spread = None if needed is None else max(needed, machines or 0)
    read = sum(block_bytes(replace(b, matrices=b.read), dtype, quantize) for b in facts.blocks)
    return Estimate(
        precision=precision.name,
        block_bytes=max(block_bytes(b, dtype, quantize) for b in facts.blocks),
        model_bytes=sum(block_bytes(b, dtype, quantize) for b in facts.blocks),
        cache_bytes_per_token=round(sum(cache_bytes(b, dtype) * kept_share(b, context) for b in facts.blocks)),
        blocks_fit=fit,
        machines=needed,
        spread=spread,
        compute_ms=read / machine.bytes_a_second * 1e3,
        network_ms=None if spread is None else (spread + 1) * round_trip_ms / 2,
    )
