"""From an adapter's folder, as PEFT saves it, to what it adds to the blocks of a span.

    adapter_config.json           kind, scaling, and what else its training has changed
    adapter_model.safetensors     ...layers.3.self_attn.q_proj.lora_A.weight [rank, in], ...lora_B.weight [out, rank]

Only the tensors of the span's own blocks are read. What would compute something else than `Adapter` does is refused by
its name in the configuration: an answer that is silently wrong is worse than none.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lilliput.errors import ModelError
from lilliput.models.checkpoint import read_json
from lilliput.models.lora import Adapter, LowRank

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
NAME = re.compile(r"[A-Za-z0-9][\w.\-]{0,63}")

#: settings that are honoured, or that concern nothing but training
_UNDERSTOOD = {
    *("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
    *("lora_dropout", "fan_in_fan_out", "init_lora_weights", "loftq_config", "eva_config", "megatron_core"),
    *("qalora_group_size", "runtime_config", "ensure_weight_tying"),
}
#: ways to begin a training that leave the model's own weights as they are
_PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")

#: (in, out) of the linear layers of each block, by their paths inside it
Layers = Mapping[int, Mapping[str, tuple[int, int]]]


def read_adapter(name: str, folder: str | Path, layers: Layers, *, blocks: int, lists: str, dtype: Any) -> Adapter:
    """Read what an adapter adds to the blocks in `layers`. Raises `ModelError`, naming the file and what is wrong.

    :param layers: the linear layers of the span's blocks
    :param blocks: how many blocks the whole model has
    :param lists: what the family calls its list of blocks (`layers`, `h`)
    """
    folder = Path(folder).expanduser()
    config = check_adapter(name, folder)
    read = _Tensors(name, folder / WEIGHTS, lists, blocks).read(set(layers))
    found: dict[int, dict[str, LowRank]] = {}
    for (block, path), (key, a, b) in read.items():
        if path not in layers[block]:
            raise ModelError(f"the adapter {name} changes {path} of block {block}, which is no linear layer there")
        wanted, got = layers[block][path], (a.shape[-1], b.shape[0])
        if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1] or got != wanted:
            raise ModelError(
                f"the adapter {name} does not fit this model: {key} has the shapes {list(a.shape)} and "
                f"{list(b.shape)}, but {path} of block {block} has {wanted[0]} inputs and {wanted[1]} outputs"
            )
        rank = _by_pattern(config, "rank_pattern", key, config.get("r"))
        if rank != a.shape[0]:
            raise ModelError(f"{folder / WEIGHTS} has rank {a.shape[0]} for {key}, {folder / CONFIG} says {rank}")
        alpha = float(_by_pattern(config, "alpha_pattern", key, config.get("lora_alpha")))
        scaling = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        found.setdefault(block, {})[path] = LowRank(a, b, scaling, dtype)
    _check_complete(name, folder, config, layers, found)
    return Adapter(name, found)


def check_name(name: str) -> None:
    """Raise `ModelError` unless an adapter may be called so."""
    if not NAME.fullmatch(name):
        raise ModelError(
            f"{name!r} is no name for an adapter: up to 64 letters, digits, dots, dashes and underscores, "
            f"beginning with a letter or a digit"
        )


def check_adapter(name: str, folder: str | Path) -> dict[str, Any]:
    """An adapter's configuration. Raises `ModelError` if it cannot be served, whatever its weights are."""
    check_name(name)
    folder = Path(folder).expanduser()
    file = folder / CONFIG
    try:
        config = read_json(file, "Give a folder that PEFT has saved.")
    except ModelError as e:
        raise ModelError(f"the adapter {name}: {e}") from e
    if config.get("peft_type") != "LORA":
        raise ModelError(
            f"the adapter {name} is of the kind {config.get('peft_type')}; only LORA can be served ({file})"
        )
    refused = [
        key
        for key, value in config.items()
        if key not in _UNDERSTOOD and value not in (None, False, "none", "") and value != [] and value != {}
    ]
    if config.get("init_lora_weights") not in _PLAIN_STARTS:
        refused.append(f"init_lora_weights={config['init_lora_weights']}, which changes the model's own weights")
    if refused:
        raise ModelError(f"the adapter {name} cannot be served: it uses {', '.join(sorted(refused))} ({file})")
    ranks = [config.get("r"), *(config.get("rank_pattern") or {}).values()]
    alphas = [config.get("lora_alpha"), *(config.get("alpha_pattern") or {}).values()]
    if not all(isinstance(r, int) and r > 0 for r in ranks) or not all(isinstance(a, int | float) for a in alphas):
        raise ModelError(f"the adapter {name}: {file} has no sensible r and lora_alpha")
    return config


class _Tensors:
    """The weights' file.

    :param lists: see `read_adapter`
    """

    def __init__(self, name: str, file: Path, lists: str, blocks: int) -> None:
        self._name, self._file, self._blocks = name, file, blocks
        self._key = re.compile(rf"(?:.+\.)?{re.escape(lists)}\.(\d+)\.(.+)\.lora_([AB])\.weight")

    def read(self, wanted: set[int]) -> dict[tuple[int, str], tuple[str, torch.Tensor, torch.Tensor]]:
        """For these blocks and the paths inside them: the layer's full name, A and B."""
        from safetensors import SafetensorError, safe_open

        if not self._file.is_file():
            raise ModelError(f"the adapter {self._name}: {self._file} is not there (pickled weights are not read)")
        try:
            with safe_open(self._file, framework="pt") as tensors:
                places = {key: self._place(key) for key in tensors.keys()}  # noqa: SIM118 (it is no dictionary)
                halves = {
                    (block, path, half): (key, tensors.get_tensor(key))
                    for key, (block, path, half) in places.items()
                    if block in wanted
                }
        except (SafetensorError, OSError, ValueError, RuntimeError) as e:
            raise ModelError(f"the adapter {self._name}: {self._file} is damaged: {e}") from e
        if not places:
            raise ModelError(f"the adapter {self._name}: {self._file} holds no tensors")
        pairs: dict[tuple[int, str], tuple[str, torch.Tensor, torch.Tensor]] = {}
        for (block, path, half), (key, tensor) in halves.items():
            other = halves.get((block, path, "B" if half == "A" else "A"))
            if other is None:
                raise ModelError(f"the adapter {self._name}: {self._file} has {key} without its other half")
            if not bool(torch.isfinite(tensor).all()):
                raise ModelError(f"the adapter {self._name}: {self._file} is damaged: {key} holds no finite numbers")
            if half == "A":
                full = key.removesuffix(".lora_A.weight").removeprefix("base_model.model.")
                pairs[block, path] = full, tensor, other[1]
        return pairs

    def _place(self, key: str) -> tuple[int, str, str]:
        match = self._key.fullmatch(key)
        if match is None:
            raise ModelError(
                f"the adapter {self._name} cannot be served: it changes more than the linear layers of the blocks: "
                f"{key} in {self._file}"
            )
        block, path = int(match[1]), match[2]
        if block >= self._blocks:
            raise ModelError(f"the adapter {self._name} is for another model: it has {key}, of {self._blocks} blocks")
        if "experts" in path.split("."):  # each of them sees other tokens than the block does
            raise ModelError(f"the adapter {self._name} cannot be served: it changes experts: {key} in {self._file}")
        return block, path, match[3]


def _by_pattern(config: dict[str, Any], patterns: str, key: str, default: Any) -> Any:
    """The first pattern that a layer's full name ends with decides, as PEFT has it."""
    for pattern, value in (config.get(patterns) or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", key):
            return value
    return default


def _check_complete(
    name: str, folder: Path, config: dict[str, Any], layers: Layers, found: Mapping[int, Mapping[str, Any]]
) -> None:
    """Every layer that the configuration names must have its tensors, as far as it names them plainly."""
    targets = config.get("target_modules")
    if not isinstance(targets, list) or config.get("exclude_modules") or config.get("layers_pattern"):
        return
    only = config.get("layers_to_transform")
    chosen = {only} if isinstance(only, int) else set(only) if only else set(layers)
    for block in sorted(set(layers) & chosen):
        for path in layers[block]:
            if any(path == t or path.endswith(f".{t}") for t in targets) and path not in found.get(block, {}):
                raise ModelError(
                    f"the adapter {name} is not whole, or for another model: {folder / WEIGHTS} has nothing for {path} "
                    f"of block {block}"
                )
