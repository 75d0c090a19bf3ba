"""The families of models that are proven to work, each as a tiny configuration that shows what is its own.

A family that mixes kinds of layers has at least one of each in the first and in the last span, and windows are shorter
than the text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

BLOCKS = 6
WINDOW = 9

#: what most configurations call their sizes
_SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_HEAD = {**_SIZES, "head_dim": 16}
#: for families as old as GPT-2, and for those that have as many key heads as query heads
_GPT = {"vocab_size": 128, "n_embd": 64, "n_layer": BLOCKS, "n_head": 4, "n_positions": 256}
_OLD = {name: size for name, size in _SIZES.items() if name != "num_key_value_heads"}
_FALCON = {name: size for name, size in _OLD.items() if name != "intermediate_size"}
_ALTERNATING = ["sliding_attention", "full_attention"] * (BLOCKS // 2)
_NO_DROPOUT = {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0}


@dataclass(frozen=True)
class Family:
    """A configuration to be made by `AutoConfig.for_model(model_type, **config)`."""

    name: str
    model_type: str
    #: what its attention and its layers are, for people
    kind: str
    config: dict[str, Any] = field(default_factory=dict)
    #: transformers' attention to compare with
    reference: str = "eager"
    #: the oldest release of transformers with which it was tried and works; in older ones it is refused
    since: str = "4.56"


FAMILIES = [
    Family("llama", "llama", "grouped queries", _SIZES),
    Family("mistral", "mistral", "sliding window", {**_SIZES, "sliding_window": WINDOW}),
    Family("mixtral", "mixtral", "experts", {**_SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}),
    Family(
        "qwen2",
        "qwen2",
        "sliding window in the later layers",
        {**_SIZES, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    Family("qwen3", "qwen3", "norms of queries and keys", _HEAD),
    Family(
        "qwen3_moe",
        "qwen3_moe",
        "experts and dense layers",
        {
            **_HEAD,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "mlp_only_layers": [1, 4],
            "norm_topk_prob": True,
        },
    ),
    Family("gemma", "gemma", "scaled embedding", _HEAD),
    Family(
        "gemma2",
        "gemma2",
        "window every other layer, soft caps",
        {**_HEAD, "sliding_window": WINDOW, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 10.0},
    ),
    Family(
        "gemma3",
        "gemma3_text",
        "windows, two rotary bases",
        {**_HEAD, "sliding_window": WINDOW, "layer_types": _ALTERNATING, "query_pre_attn_scalar": 16},
        since="5.12",
    ),
    Family("phi", "phi", "parallel attention, partial rotary", _OLD),
    Family("phi3", "phi3", "joined projections, sliding window", {**_SIZES, "sliding_window": WINDOW}),
    Family("gpt2", "gpt2", "absolute positions", {**_GPT, **_NO_DROPOUT}),
    Family("gpt_neox", "gpt_neox", "parallel attention, partial rotary", _OLD),
    Family(
        "gptj",
        "gptj",
        "parallel attention, partial rotary",
        {**_GPT, **_NO_DROPOUT, "rotary_dim": 8},
        since="5.24",
    ),
    Family(
        "opt",
        "opt",
        "absolute positions",
        {**{n: s for n, s in _OLD.items() if n != "intermediate_size"}, "ffn_dim": 96, "word_embed_proj_dim": 32},
    ),
    Family(
        "bloom",
        "bloom",
        "alibi, normed embedding",
        {"vocab_size": 128, "hidden_size": 64, "n_layer": BLOCKS, "n_head": 4},
    ),
    Family(
        "bloom, 6 heads",
        "bloom",
        "alibi, heads no power of two",
        {
            "vocab_size": 128,
            "hidden_size": 48,
            "n_layer": BLOCKS,
            "n_head": 6,
            "apply_residual_connection_post_layernorm": True,
        },
    ),
    Family(
        "falcon, alibi",
        "falcon",
        "alibi",
        {**_FALCON, "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
        reference="sdpa",  # transformers' eager attention of this family adds alibi twice, the usual one once
    ),
    Family("falcon, multi-query", "falcon", "one key head, parallel attention", {**_FALCON, "multi_query": True}),
    Family(
        "falcon, grouped",
        "falcon",
        "grouped queries, two parallel norms",
        {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    Family(
        "mpt", "mpt", "alibi", {"vocab_size": 128, "d_model": 64, "n_layers": BLOCKS, "n_heads": 4, "max_seq_len": 256}
    ),
    Family(
        "stablelm",
        "stablelm",
        "partial rotary, norms per head",
        {**_SIZES, "qk_layernorm": True},
        since="5.12",
    ),
    Family("starcoder2", "starcoder2", "sliding window", {**_SIZES, "sliding_window": WINDOW}),
    Family("cohere", "cohere", "parallel attention, interleaved rotary", {**_SIZES, "use_qk_norm": True}),
    Family(
        "cohere2",
        "cohere2",
        "windows, no positions in full layers",
        {**_HEAD, "sliding_window": WINDOW, "layer_types": _ALTERNATING},
    ),
    Family("olmo2", "olmo2", "norms after, norms of queries and keys", _SIZES),
    Family(
        "granite",
        "granite",
        "multipliers",
        {
            **_SIZES,
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
        },
    ),
    Family("glm4", "glm4", "four norms, interleaved partial rotary", _HEAD),
    Family(
        "deepseek_v3",
        "deepseek_v3",
        "latent attention, experts and dense layers",
        {
            **_OLD,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 32,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 16,
            "q_lora_rank": 24,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 12,
        },
    ),
    Family(
        "gpt_oss",
        "gpt_oss",
        "experts, sinks, windows",
        {
            **_HEAD,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
            "layer_types": _ALTERNATING,
        },
    ),
    Family("smollm3", "smollm3", "no positions every other layer", {**_SIZES, "no_rope_layer_interval": 2}),
]

#: families that cannot be served (yet), by model_type, and a word of the reason that users are told
REFUSED = {
    "mamba": "layers keep a running state",
    "mamba2": "layers keep a running state",
    "falcon_mamba": "layers keep a running state",
    "jamba": "layers keep a running state",
    "bamba": "layers keep a running state",
    "zamba2": "layers keep a running state",
    "rwkv": "layers keep a running state",
    "recurrent_gemma": "layers keep a running state",
    "qwen3_next": "layers keep a running state",
    "lfm2": "layers keep a running state",
    "t5": "an encoder besides its decoder",
    "bart": "an encoder besides its decoder",
    "whisper": "an encoder besides its decoder",
    "vit": "reads images and writes no text",
    "llama4_text": "depends on places",
    "gemma3n_text": "more than hidden states",
}
