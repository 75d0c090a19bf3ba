"""The tokenizer in a GGUF file, written as Hugging Face's files."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import gguf

logger = logging.getLogger(__name__)

#: the GGUF type of tokens that stand for themselves, never for a piece of text
CONTROL_TOKEN = 3
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
#: how byte-level tokenizers cut text into words, by GGUF's name (`tokenizer.ggml.pre`); None: as GPT-2 does
_CUTS = {
    "gpt-2": None,
    "smollm": None,  # and single digits before
    "llama-bpe": _WORDS % r"\p{N}{1,3}",
    "qwen2": _WORDS % r"\p{N}",
}


def write(reader: gguf.GGUFReader, folder: Path, max_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json into `folder`, or nothing if the tokenizer is not understood.

    Servers need none. A tokenizer that cuts text in another way than the model was trained on is worse than none.
    """
    kind, cut = _value(reader, "tokenizer.ggml.model"), _value(reader, "tokenizer.ggml.pre")
    if kind != "gpt2" or cut not in _CUTS or _value(reader, "tokenizer.ggml.merges") is None:
        logger.warning(
            "a tokenizer of kind %s/%s is not read from GGUF files: clients need the model's folder", kind, cut
        )
        return
    tokens: list[str] = _value(reader, "tokenizer.ggml.tokens")
    kinds: list[int] = _value(reader, "tokenizer.ggml.token_type") or [1] * len(tokens)
    special = {
        ours: tokens[number]
        for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))
        if (number := _value(reader, f"tokenizer.ggml.{theirs}_token_id")) is not None
    }
    first = special.get("bos") if _value(reader, "tokenizer.ggml.add_bos_token") else None
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    _write_tokens(folder, tokens, _value(reader, "tokenizer.ggml.merges"), control, cut, first)
    config: dict[str, Any] = {
        # the class that takes tokenizer.json as it is, in transformers 4 and 5
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{name}_token": token for name, token in special.items()},
        "clean_up_tokenization_spaces": False,
        # transformers 4 would make token_type_ids too, which a Llama does not take
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": max_length,
    }
    if template := _value(reader, "tokenizer.chat_template"):
        config["chat_template"] = template
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _write_tokens(
    folder: Path, tokens: list[str], merges: list[str], control: list[str], cut: str, first: str | None
) -> None:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[(left, right) for left, _, right in (merge.partition(" ") for merge in merges)],
            ignore_merges=cut == "llama-bpe",
        )
    )
    pattern = _CUTS[cut]
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if cut == "smollm" else []
    if pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(pattern), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    if first is not None:
        number = tokenizer.token_to_id(first)
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{first} $A", pair=f"{first} $A {first} $B", special_tokens=[(first, number)]
        )
    tokenizer.save(str(folder / "tokenizer.json"))


def _value(reader: gguf.GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    return None if field is None else field.contents()
