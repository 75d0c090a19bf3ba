"""A model in one GGUF file, as a Hugging Face folder whose weights are made part by part.

transformers reads GGUF files too, but whole, and drops the model's pre-tokenizer, so that numbers after spaces come out
as other tokens than the model was trained on. Here a tensor is read when its block is asked for, and none before.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lilliput.errors import ModelError, UnsupportedModel
from lilliput.models import gguf_tokenizer
from lilliput.models.checkpoint import INDEX, Shapes
from lilliput.models.facts import DTYPE_BYTES
from lilliput.models.hub import out_of_space
from lilliput.models.progress import Progress, silent

if TYPE_CHECKING:
    import gguf
    import torch

#: GGUF's names of a block's modules, and Hugging Face's
BLOCK_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
END_MODULES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
#: GGUF's names of architectures, and the class of each. Mistral's models are called llama there, too.
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
#: raised when the conversion changes
_CONVERSION = 1


class GGUFFile:
    """The file, and where what is made of it lies. Raises `ModelError` if it cannot be read or served.

    :param blocks_per_shard: each file of weights that is made holds so many blocks; the first one holds the ends
    """

    def __init__(self, file: Path, *, blocks_per_shard: int = 1) -> None:
        self.file, self.name = file, file.stem
        self._blocks_per_shard = blocks_per_shard

    @cached_property
    def _reader(self) -> gguf.GGUFReader:
        import gguf

        try:
            reader = gguf.GGUFReader(self.file)
            end = max((int(t.data_offset) + int(t.n_bytes) for t in reader.tensors), default=0)
        except Exception as error:  # whatever half a file makes the library stumble over
            raise ModelError(
                f"{self.file} is damaged, or no GGUF file ({type(error).__name__}: {error}). Fetch it again."
            ) from error
        if end > self.file.stat().st_size:
            raise ModelError(f"{self.file} is damaged: it ends before its tensors do. Fetch it again.")
        return reader

    def folder(self, progress: Progress = silent) -> Path:
        """A folder with the model's configuration and tokenizer, made at the first call. Raises `ModelError`."""
        import filelock

        from lilliput.models.sources import cache_folder

        facts = self.file.stat()
        key = f"{self.file.resolve()} {facts.st_size} {facts.st_mtime_ns}"
        home = cache_folder() / "gguf" / f"{_CONVERSION}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
        target = home / self.name
        if target.is_dir():
            return target
        progress(f"reading {self.file.name}", 0, None)
        self.config()  # what is refused is refused before anything is written
        try:
            home.mkdir(parents=True, exist_ok=True)
            with filelock.FileLock(home / "lock"):
                if not target.is_dir():
                    unfinished = home / "unfinished"
                    shutil.rmtree(unfinished, ignore_errors=True)  # left behind by a process that was killed
                    unfinished.mkdir()
                    self.describe(unfinished)
                    unfinished.rename(target)
        except OSError as error:
            raise _not_written(home, error) from error
        return target

    def describe(self, folder: Path) -> None:
        """Write configuration, tokenizer and index into an existing folder."""
        config = self.config()
        write_json(folder / "config.json", config)
        special: dict[str, Any] = {
            k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id") if k in config
        }
        write_json(folder / "generation_config.json", special)
        gguf_tokenizer.write(self._reader, folder, config["max_position_embeddings"])
        names = {ours: shard for shard, tensors in self._shards.items() for ours in tensors}
        each = DTYPE_BYTES[self._dtype]
        size = each * sum(int(tensor.n_elements) for tensor in self._reader.tensors)
        write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": names})

    def bring(self, folder: Path, files: Iterable[str], progress: Progress) -> None:
        """Make files of weights in the folder, unless they are there. Raises `ModelError`."""
        import filelock
        from safetensors.torch import save_file

        new = [file for file in files if not (folder / file).is_file()]
        if not new:
            return
        each = DTYPE_BYTES[self._dtype]
        total = each * sum(int(t.n_elements) for file in new for t in self._shards[file].values())
        done = 0
        try:
            with filelock.FileLock(folder.parent / "lock"):
                for file in new:
                    progress(f"converting {self.name}", done, total)
                    if not (folder / file).is_file():  # another process may have been faster
                        content = {ours: self._tensor(t) for ours, t in self._shards[file].items()}
                        unfinished = folder / f"{file}.unfinished"
                        save_file(content, str(unfinished), metadata={"format": "pt"})
                        shutil.copymode(folder / "config.json", unfinished)  # else only the owner may read it
                        os.replace(unfinished, folder / file)
                    done += each * sum(int(t.n_elements) for t in self._shards[file].values())
        except Exception as error:  # safetensors reports a full disk with an exception of its own
            if isinstance(error, OSError) or out_of_space(error):
                raise _not_written(folder, error) from error
            raise
        progress(f"converting {self.name}", total, total)

    def shapes(self, file: str) -> Shapes:
        """The shapes of the tensors that a file of weights has, or would have."""
        return {ours: _shape(tensor) for ours, tensor in self._shards[file].items()}

    def config(self) -> dict[str, Any]:
        """What config.json says. Raises `ModelError` for a model that cannot be served."""
        architecture = self._value("general.architecture")
        if architecture not in ARCHITECTURES:
            raise UnsupportedModel(
                f"{self.file.name} holds a {architecture} model. Of GGUF files, only those of "
                f"{', '.join(ARCHITECTURES)} are understood; use the model in safetensors."
            )
        scaling = self._value(f"{architecture}.rope.scaling.type", "none")
        strange = sorted(tensor.name for tensor in self._reader.tensors if _our_name(tensor.name) is None)
        if scaling != "none" or strange:
            what = f"tensors such as {strange[0]}" if strange else f"{scaling} scaling of its positions"
            raise UnsupportedModel(
                f"{self.file.name} has {what}, which are not understood here; use the model in safetensors."
            )

        def own(key: str, *default: Any) -> Any:
            return self._value(f"{architecture}.{key}", *default)

        hidden, heads = own("embedding_length"), own("attention.head_count")
        names = {tensor.name: tensor for tensor in self._reader.tensors}
        config = {
            "architectures": [ARCHITECTURES[architecture]],
            "model_type": architecture,
            "hidden_act": "silu",
            "hidden_size": hidden,
            "intermediate_size": own("feed_forward_length"),
            "num_hidden_layers": own("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": own("attention.head_count_kv", heads),
            "max_position_embeddings": own("context_length"),
            # GGUF keeps it in single precision, where 1e-05 reads 9.999999747378752e-06
            "rms_norm_eps": float(f"{own('attention.layer_norm_rms_epsilon'):.6g}"),
            "rope_theta": float(f"{own('rope.freq_base', 10000.0):.8g}"),
            "vocab_size": _shape(names["token_embd.weight"])[0],
            "tie_word_embeddings": "output.weight" not in names,
            "torch_dtype": self._dtype,
        }
        head_dim = own("attention.key_length", hidden // heads)
        if head_dim * heads != hidden or architecture == "qwen3":
            config["head_dim"] = head_dim
        if architecture == "llama" and "blk.0.attn_q.bias" in names:
            config["attention_bias"] = True
        for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
            number = self._value(f"tokenizer.ggml.{theirs}_token_id", -1)
            if number >= 0:
                config[f"{ours}_token_id"] = number
        lacking = {f"blk.{block}.attn_q.weight" for block in range(config["num_hidden_layers"])} - set(names)
        if lacking:
            raise ModelError(f"{self.file} is damaged: it lacks {min(lacking)}. Fetch it again.")
        return config

    @cached_property
    def _shards(self) -> dict[str, dict[str, gguf.ReaderTensor]]:
        """By the name of each file of weights: its tensors, by Hugging Face's names."""
        groups: dict[int, dict[str, gguf.ReaderTensor]] = {}
        for tensor in sorted(self._reader.tensors, key=lambda tensor: tensor.name):
            ours = _our_name(tensor.name)
            assert ours is not None
            parts = tensor.name.split(".")
            group = 1 + int(parts[1]) // self._blocks_per_shard if parts[0] == "blk" else 0
            groups.setdefault(group, {})[ours] = tensor
        return {f"model-{i + 1:05}-of-{len(groups):05}.safetensors": tensors for i, tensors in sorted(groups.items())}

    @property
    def _dtype(self) -> str:
        """What the weights are made into: what they are if they are not quantized, else bfloat16."""
        kind = next(t.tensor_type.name for t in self._reader.tensors if t.name.endswith("attn_q.weight"))
        return {"F32": "float32", "F16": "float16"}.get(kind, "bfloat16")

    def _tensor(self, tensor: gguf.ReaderTensor) -> torch.Tensor:
        """A tensor as Hugging Face has it, `[out, in]` or `[hidden]`."""
        import torch
        from gguf.quants import dequantize

        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()).view(_shape(tensor))
        key = {"attn_q": "head_count", "attn_k": "head_count_kv"}.get(tensor.name.split(".")[-2])
        if key is not None and self._value("general.architecture") == "llama":
            # there neighbours are rotated, here a head's halves: [heads, half, 2, in] -> [heads, 2, half, in]
            heads = self._value(f"llama.attention.{key}", None) or self._value("llama.attention.head_count")
            values = values.view(heads, -1, 2, *values.shape[1:]).transpose(1, 2).reshape(values.shape)
        return values.to(getattr(torch, self._dtype)).contiguous()

    def _value(self, key: str, *default: Any) -> Any:
        field = self._reader.get_field(key)
        if field is not None:
            return field.contents()
        if default:
            return default[0]
        raise ModelError(f"{self.file} lacks {key}.")


def convert(file: Path, folder: Path, *, blocks_per_shard: int = 5, progress: Progress = silent) -> None:
    """Write the whole model in a GGUF file into the existing `folder`. Raises `ModelError`."""
    source = GGUFFile(file, blocks_per_shard=blocks_per_shard)
    progress("reading", 0, None)
    source.describe(folder)
    source.bring(folder, source._shards, lambda stage, done, total: progress("converting", done, total))


def write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _our_name(theirs: str) -> str | None:
    """Hugging Face's name of a tensor; None for one that is not known."""
    *module, kind = theirs.split(".")
    if len(module) == 1 and module[0] in END_MODULES:
        return f"{END_MODULES[module[0]]}.{kind}"
    if len(module) == 3 and module[0] == "blk" and module[2] in BLOCK_MODULES:
        return f"model.layers.{module[1]}.{BLOCK_MODULES[module[2]]}.{kind}"
    return None


def _shape(tensor: gguf.ReaderTensor) -> tuple[int, ...]:
    return tuple(int(n) for n in reversed(tensor.shape))


def _not_written(where: Path, error: Exception) -> ModelError:
    if out_of_space(error):
        return ModelError(f"The disk is full: {where} cannot hold the weights. Set LILLIPUT_CACHE to another disk.")
    return ModelError(f"{where} cannot be written: {error}. Set LILLIPUT_CACHE to a folder of yours.")
