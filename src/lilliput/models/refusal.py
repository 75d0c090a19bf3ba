"""Which models cannot be served, and why: from a config.json alone, before anything large is fetched or read.

What is served is a chain of blocks that each take hidden states, give hidden states, and keep keys and values.
"""

from __future__ import annotations

import re
from typing import Any

from lilliput.models import quantized_checkpoint

#: kinds of layers that a configuration may name in `layer_types` and the like
_KINDS_SERVED = frozenset({"full_attention", "sliding_attention", "attention"})
_KINDS_NAMED_IN = ("layer_types", "layers_block_type", "block_types")

_STATE = "some of its layers keep a running state instead of keys and values, which cannot be paged or rolled back yet"
_MORE = "its blocks hand each other more than hidden states"
_PLACES = "its attention depends on places in a way that packed batches do not keep yet"

#: of families whose configurations say it in no other way
_BY_TYPE = {
    **dict.fromkeys(("rwkv", "xlstm", "minimax", "lfm2", "lfm2_moe", "recurrent_gemma", "zaya"), _STATE),
    **dict.fromkeys(("gemma3n", "gemma3n_text", "gemma4", "gemma4_text", "dory", "blt"), _MORE),
    **dict.fromkeys(("llama4", "llama4_text"), _PLACES),
}
#: facts that only such families have
_BY_FACT = {
    **dict.fromkeys(
        ("state_size", "ssm_state_size", "mamba_d_state", "mamba_d_ssm", "linear_conv_kernel_dim", "conv_L_cache"),
        _STATE,
    ),
    **dict.fromkeys(("altup_num_inputs", "hidden_size_per_layer_input", "hc_mult", "index_topk"), _MORE),
    "attention_chunk_size": _PLACES,
    "use_bidirectional_attention": "it attends to what comes later",
}
_WRITES_TEXT = re.compile(r"CausalLM|LMHead|ConditionalGeneration|DoubleHeads|Model$")


def refusal(config: dict[str, Any]) -> str | None:
    """Why a model with this configuration cannot be served; None if nothing speaks against it."""
    text = config.get("text_config")
    c: dict[str, Any] = {**config, **text} if isinstance(text, dict) else config
    kind = str(c.get("model_type", ""))
    if config.get("is_encoder_decoder"):
        return "it has an encoder besides its decoder, and only decoders are served"
    if "vocab_size" not in c and any(fact in c for fact in ("image_size", "num_channels", "patch_size")):
        return "it reads images and writes no text"
    architectures = config.get("architectures") or []
    if architectures and not any(_WRITES_TEXT.search(str(name)) for name in architectures):
        return f"it is made for another purpose than writing text ({', '.join(map(str, architectures))})"
    if kind in _BY_TYPE:
        return _BY_TYPE[kind]
    for fact, reason in _BY_FACT.items():
        if c.get(fact):
            return reason
    kinds = {str(k) for name in _KINDS_NAMED_IN if isinstance(c.get(name), list) for k in c[name]} - _KINDS_SERVED
    if kinds:
        return f"its layers of kind {', '.join(sorted(kinds))} are not known here"
    return quantized_checkpoint.objection(config)
