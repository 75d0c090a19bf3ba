"""A Llama model in one GGUF file, rewritten as a Hugging Face folder.

transformers reads GGUF files too, but needs accelerate for it and drops the model's pre-tokenizer, so that numbers
after spaces come out as other tokens than the model was trained on.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lilliput.errors import ModelError
from lilliput.models.progress import Progress, silent

if TYPE_CHECKING:
    import gguf
    import torch

#: GGUF's names of a block's tensors, and Hugging Face's
BLOCK_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
#: the `tokenizer.ggml.pre` under which text is cut into single digits before the usual byte-level rules
SINGLE_DIGITS = "smollm"
#: the GGUF type of tokens that stand for themselves, never for a piece of text
CONTROL_TOKEN = 3


def convert(file: Path, folder: Path, *, blocks_per_shard: int = 5, progress: Progress = silent) -> None:
    """Write the model in the GGUF `file` into the existing `folder`: weights in bfloat16, configuration, tokenizer.

    Each shard holds whole blocks, so a server of a few blocks opens few files. Raises ModelError for a model it does
    not know.
    """
    import gguf

    progress("reading", 0, None)
    reader = gguf.GGUFReader(file)
    architecture, tokens = _value(reader, "general.architecture"), _value(reader, "tokenizer.ggml.model")
    pre_tokenizer = _value(reader, "tokenizer.ggml.pre")
    if (architecture, tokens, pre_tokenizer) != ("llama", "gpt2", SINGLE_DIGITS):
        raise ModelError(
            f"{file.name} holds a {architecture} model with {tokens}/{pre_tokenizer} tokens, which is not supported."
        )
    config = _config(reader)
    _write_json(folder / "config.json", config)
    _write_json(
        folder / "generation_config.json", {k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id")}
    )
    _write_tokenizer(reader, folder, config["max_position_embeddings"])
    _write_weights(reader, folder, config, blocks_per_shard, progress)


def _value(reader: gguf.GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    if field is None:
        raise ModelError(f"The GGUF file lacks {key}.")
    return field.contents()


def _config(reader: gguf.GGUFReader) -> dict[str, Any]:
    tied = not any(tensor.name == "output.weight" for tensor in reader.tensors)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": _value(reader, "llama.embedding_length"),
        "intermediate_size": _value(reader, "llama.feed_forward_length"),
        "num_hidden_layers": _value(reader, "llama.block_count"),
        "num_attention_heads": _value(reader, "llama.attention.head_count"),
        "num_key_value_heads": _value(reader, "llama.attention.head_count_kv"),
        "max_position_embeddings": _value(reader, "llama.context_length"),
        # GGUF keeps it in single precision, where 1e-05 reads 9.999999747378752e-06
        "rms_norm_eps": float(f"{_value(reader, 'llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": _value(reader, "llama.rope.freq_base"),
        "vocab_size": _value(reader, "llama.vocab_size"),
        "tie_word_embeddings": tied,
        "bos_token_id": _value(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _value(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _value(reader, "tokenizer.ggml.padding_token_id"),
        "torch_dtype": "bfloat16",
    }


def _write_tokenizer(reader: gguf.GGUFReader, folder: Path, max_length: int) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = _value(reader, "tokenizer.ggml.tokens")
    kinds: list[int] = _value(reader, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ", 1)) for merge in _value(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.save(str(folder / "tokenizer.json"))

    def special(name: str) -> str:
        return tokens[_value(reader, f"tokenizer.ggml.{name}_token_id")]

    _write_json(
        folder / "tokenizer_config.json",
        {
            # the class that takes tokenizer.json as it is, in transformers 4 and 5
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": special("bos"),
            "eos_token": special("eos"),
            "pad_token": special("padding"),
            "unk_token": special("unknown"),
            "clean_up_tokenization_spaces": False,
            # transformers 4 would make token_type_ids too, which a Llama does not take
            "model_input_names": ["input_ids", "attention_mask"],
            "model_max_length": max_length,
            "chat_template": _value(reader, "tokenizer.chat_template"),
        },
    )


def _write_weights(
    reader: gguf.GGUFReader, folder: Path, config: dict[str, Any], blocks_per_shard: int, progress: Progress
) -> None:
    from safetensors.torch import save_file

    tensors = {tensor.name: tensor for tensor in reader.tensors}
    shards = list(_shards(config, blocks_per_shard))
    wanted = {theirs for shard in shards for theirs, _ in shard}
    if wanted != set(tensors):
        raise ModelError(
            f"The GGUF file's tensors are not a Llama model's; first differences: {sorted(wanted ^ set(tensors))[:3]}"
        )
    total = 2 * sum(int(tensor.n_elements) for tensor in reader.tensors)  # bytes in bfloat16
    done = 0
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards, start=1):
        progress("converting", done, total)
        content = {ours: _bfloat16(tensors[theirs], config) for theirs, ours in shard}
        name = f"model-{i:05}-of-{len(shards):05}.safetensors"
        save_file(content, str(folder / name), metadata={"format": "pt"})
        shutil.copymode(folder / "config.json", folder / name)  # safetensors lets nobody but the owner read
        weight_map |= dict.fromkeys(content, name)
        done += sum(tensor.nbytes for tensor in content.values())
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": done}, "weight_map": weight_map})
    progress("converting", done, total)


def _shards(config: dict[str, Any], blocks_per_shard: int) -> Iterator[list[tuple[str, str]]]:
    """Per shard the GGUF and the Hugging Face names of its tensors: first the model's ends, then some blocks each."""
    ends = [("token_embd.weight", "model.embed_tokens.weight"), ("output_norm.weight", "model.norm.weight")]
    yield ends if config["tie_word_embeddings"] else [*ends, ("output.weight", "lm_head.weight")]
    blocks = range(config["num_hidden_layers"])
    for start in blocks[::blocks_per_shard]:
        yield [
            (f"blk.{block}.{theirs}.weight", f"model.layers.{block}.{ours}.weight")
            for block in blocks[start : start + blocks_per_shard]
            for theirs, ours in BLOCK_TENSORS.items()
        ]


def _bfloat16(tensor: gguf.ReaderTensor, config: dict[str, Any]) -> torch.Tensor:
    """A GGUF tensor as Hugging Face's Llama has it, `[out, in]` or `[hidden]`."""
    import torch
    from gguf.quants import dequantize

    values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(tensor.name.split(".")[-2])
    if heads is not None:
        # GGUF rotates neighbours, Hugging Face the two halves of a head: [heads, half, 2, in] -> [heads, 2, half, in]
        rows, columns = values.shape
        values = values.view(config[heads], -1, 2, columns).transpose(1, 2).reshape(rows, columns)
    return values.to(torch.bfloat16).contiguous()


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
