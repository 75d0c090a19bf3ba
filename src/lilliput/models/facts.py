"""What of a model decides how large a span of it is: from its configuration and the shapes of its tensors.

No weight is read for it. Importing this module is cheap.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lilliput.errors import ModelError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
#: what configurations call the number of blocks
BLOCKS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads")
HIDDEN = ("hidden_size", "n_embd", "d_model")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
#: the first number in a tensor's dotted name is its block's
_BLOCK = re.compile(r"(?:^|\.)(\d+)\.")
#: parts of models that read more than text have layers of their own, which are no blocks
_OTHER_LAYERS = re.compile(r"vision|visual|audio|image", re.IGNORECASE)
_EXPERT = re.compile(r"\.experts\.")
#: kernels of quantized layers take outputs and inputs in multiples of these
_OUTPUTS, _INPUTS = 16, 32
#: what decides which experts a token goes to; it is never quantized
ROUTERS = frozenset({"gate", "router"})
#: families that keep linear layers as [in, out]
_TRANSPOSED = frozenset({"gpt2", "openai-gpt"})


def can_quantize(outputs: int, inputs: int) -> bool:
    """Whether a linear layer's weight can be kept in fewer bits."""
    return outputs % _OUTPUTS == 0 and inputs % _INPUTS == 0


@dataclass(frozen=True)
class BlockFacts:
    """One block's size, in numbers rather than bytes.

    :ivar matrices: numbers in its matrices, experts among them, which quantization makes smaller
    :ivar rows: of all its matrices (outputs); int8 weights have a scale for each
    :ivar others: numbers that keep their precision, such as norms, biases, routers, and what no kernel takes
    :ivar read: numbers of its matrices that one token needs; fewer than `matrices` where it has experts
    :ivar largest: numbers in its largest tensor; all experts count as one, which most releases make of them on reading
    :ivar cache: numbers that one token of one row leaves in the attention cache
    :ivar window: how many tokens it looks back, the token itself among them; None: all
    """

    matrices: int
    rows: int
    others: int
    read: int
    largest: int
    cache: int
    window: int | None = None


@dataclass(frozen=True)
class ModelFacts:
    """A model's size. `ends`: numbers in embedding, final norm and head, tied ones once; a client holds them."""

    name: str
    hidden_size: int
    blocks: tuple[BlockFacts, ...]
    ends: int
    #: the widest activation between two matrices of a block, in numbers a token
    inner_size: int


def block_of(tensor: str) -> int | None:
    """The number of the block to which a checkpoint's tensor belongs; None for the model's ends and all else."""
    if is_beside_the_text(tensor):
        return None
    found = _BLOCK.search(tensor)
    return int(found[1]) if found else None


def is_beside_the_text(tensor: str) -> bool:
    """Whether a tensor belongs to a part that reads images or sounds, which is not served."""
    return bool(_OTHER_LAYERS.search(tensor))


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of the language model, if there are others beside it."""
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else dict(config)


def first(config: Mapping[str, Any], *names: str, default: object = None) -> Any:
    """The first of `names` that a configuration has."""
    return next((config[name] for name in names if config.get(name) is not None), default)


def block_count(config: Mapping[str, Any]) -> int | None:
    """How many blocks a configuration names."""
    blocks = first(text_config(config), *BLOCKS)
    return blocks if isinstance(blocks, int) else None


def describe(name: str, config: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> ModelFacts:
    """The facts of a model with this config.json and these tensors: names as in the checkpoint, shapes in numbers.

    Raises `ModelError` if they do not belong together.
    """
    c = text_config(config)
    count = block_count(config)
    hidden = first(c, *HIDDEN)
    if not count or not isinstance(hidden, int):
        raise ModelError(f"The configuration of {name} does not say how many blocks it has, or how wide they are.")
    of_blocks: dict[int, list[tuple[str, Sequence[int]]]] = {}
    ends, tied = 0, bool(c.get("tie_word_embeddings"))
    for tensor, shape in shapes.items():
        block = block_of(tensor)
        if block is not None and block < count:  # some checkpoints carry further layers, for guessing ahead
            of_blocks.setdefault(block, []).append((tensor, shape))
        elif block is None and not is_beside_the_text(tensor) and not (tied and tensor.endswith("lm_head.weight")):
            ends += math.prod(shape)
    if lacking := [block for block in range(count) if block not in of_blocks]:
        raise ModelError(f"{name} has no tensors of block {lacking[0]}, though its configuration names {count} blocks.")
    experts = first(c, *_EXPERTS)
    used = first(c, "num_experts_per_tok", "num_experts_per_token", default=experts)
    share = min(1.0, used / experts) if experts and used else 1.0
    cache = _cache_numbers(c)
    transposed = c.get("model_type") in _TRANSPOSED
    blocks = tuple(
        _block(of_blocks[block], share, cache, window, hidden, transposed)
        for block, window in enumerate(_windows(c, count))
    )
    inner = first(c, "intermediate_size", "n_inner", "ffn_dim", default=4 * hidden)
    return ModelFacts(name, hidden, blocks, ends, max(int(inner), hidden))


def _block(
    tensors: list[tuple[str, Sequence[int]]],
    expert_share: float,
    cache: int,
    window: int | None,
    hidden: int,
    transposed: bool,
) -> BlockFacts:
    matrices = rows = others = largest = experts = 0
    read = 0.0
    for name, shape in tensors:
        if len(shape) > 3:
            continue  # a mask that old checkpoints carry
        numbers = math.prod(shape)
        experts += numbers if _EXPERT.search(name) else 0
        largest = max(largest, numbers, experts)
        outputs, inputs = _sides(name, shape, hidden, transposed)
        if not can_quantize(outputs, inputs):
            others += numbers
            continue
        matrices += numbers
        rows += numbers // inputs
        read += numbers * (expert_share if _EXPERT.search(name) else 1.0)
    return BlockFacts(matrices, rows, others, round(read), largest, cache, window)


def _sides(name: str, shape: Sequence[int], hidden: int, transposed: bool) -> tuple[int, int]:
    """Outputs and inputs of a linear layer's weight, or of each expert's; (1, 1) for other tensors."""
    *path, kind = name.split(".")
    if len(shape) < 2 or kind.endswith("bias") or (path and path[-1] in ROUTERS):
        return 1, 1
    if len(shape) == 3:  # all experts in one; what they give has the width of the hidden states
        transposed = (shape[-1] == hidden) == ("down" in kind or "down" in path[-1])
    return (shape[-1], shape[-2]) if transposed else (shape[-2], shape[-1])


def _cache_numbers(c: Mapping[str, Any]) -> int:
    """Numbers that a token leaves in a block's cache: keys and values of all their heads."""
    heads = first(c, *HEADS)
    hidden = first(c, *HIDDEN)
    if not heads:
        return 2 * int(hidden)
    head = first(c, "head_dim", default=hidden // heads)
    kv_heads = first(c, "num_key_value_heads", default=heads)
    if c.get("model_type") == "falcon":  # three generations with three ways to say it
        new = c.get("new_decoder_architecture")
        kv_heads = first(c, "num_kv_heads", default=heads) if new else 1 if c.get("multi_query", True) else heads
    if c.get("kv_lora_rank"):  # latent attention, cached as ordinary heads; a slot is as wide as the wider of the two
        head = max(c.get("qk_nope_head_dim", 0) + c.get("qk_rope_head_dim", 0), c.get("v_head_dim", 0))
        kv_heads = heads
    return 2 * int(kv_heads) * int(head)


def _windows(c: Mapping[str, Any], count: int) -> list[int | None]:
    """Each block's window. Some configurations say it for each, some how often there is none, some for all."""
    window = c.get("sliding_window")
    if not isinstance(window, int) or not c.get("use_sliding_window", True):
        return [None] * count
    pattern = c.get("sliding_window_pattern") or (2 if c.get("model_type") == "gemma2" else 0)
    if kinds := c.get("layer_types"):
        slides = [kind == "sliding_attention" for kind in kinds]
    elif pattern:
        slides = [(block + 1) % pattern != 0 for block in range(count)]
    else:
        first_sliding = c.get("max_window_layers", 0) if "use_sliding_window" in c else 0
        slides = [block >= first_sliding for block in range(count)]
    return [window if slides[block] else None for block in range(count)]
