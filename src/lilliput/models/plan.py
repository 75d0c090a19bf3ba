"""How much of a model fits where: arithmetic on plain records, without a look at files or at this machine."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from lilliput.errors import ModelError
from lilliput.models.facts import BlockFacts, ModelFacts

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
#: by the name of a quantization: bytes a number, numbers that share a scale (0: a matrix's whole row), bytes a scale
#: with its zero point
_QUANTIZED = {"int8": (1.0, 0, 4), "int4": (0.5, 32, 4), "nf4": (0.5, 64, 4)}
#: what a server takes besides: Python, torch, transformers, the p2p daemon, kernels' buffers
PROCESS_BYTES = 900 << 20
#: tokens that a server takes in one pass (the default of `serve`'s max_step_tokens)
_PASS_TOKENS = 4096


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


def working_bytes(facts: ModelFacts, dtype: str) -> int:
    """What a server needs besides blocks and cache once it runs: the process, and the activations of its largest pass.

    While it loads, the largest tensor takes the place of the activations.
    """
    full = _bytes_of(dtype)
    activations = _PASS_TOKENS * (6 * facts.hidden_size + 2 * facts.inner_size) * full
    return PROCESS_BYTES + max(activations, max(block.largest for block in facts.blocks) * full)


def blocks_that_fit(facts: ModelFacts, dtype: str, quantize: str | None, memory_bytes: int, cache_tokens: int) -> int:
    """How many blocks of a model, whichever, a server with so much memory can hold: 0 to all of them.

    :param dtype: of the activations, the cache, and the weights unless they are quantized
    :param quantize: None, int8, int4 or nf4
    :param memory_bytes: for the whole server process and its daemon
    :param cache_tokens: of attention cache, over all rows of all sessions
    """
    room = memory_bytes - working_bytes(facts, dtype)
    # blocks may differ (dense layers among experts): the largest must fit, since it is not known which they will be
    sizes = sorted(
        (block_bytes(b, dtype, quantize) + cache_tokens * cache_bytes(b, dtype) for b in facts.blocks), reverse=True
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
)
