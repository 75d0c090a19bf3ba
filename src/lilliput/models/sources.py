"""From a model's name to its files.

A name is the demo's (`smollm2`), a local folder, or a hub id (`org/name`). Whatever it is, what comes out is a folder
in the layout of the Hugging Face hub: config.json, tokenizer files, safetensors. Importing this module is cheap.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lilliput.errors import ModelError, UnsupportedModel
from lilliput.models.progress import Progress, silent
from lilliput.models.refusal import refusal

#: the demo model's canonical name, and the other names by which it is known (in lower case)
DEMO = "SmolLM2-135M-Instruct"
DEMO_NAMES = frozenset({"smollm2", DEMO.lower(), f"huggingfacetb/{DEMO}".lower()})

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
#: what a model's folder holds besides its weights; no Python files: nothing that was downloaded is executed
LIGHT_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.\-]*(/[A-Za-z0-9][\w.\-]*)?")
_HUB_SNAPSHOT = re.compile(r"models--(?:.+--)?(?P<name>.+)")


@dataclass(frozen=True)
class ModelFiles:
    """A model whose files lie on this machine."""

    #: the name under which the swarm knows the model: the same wherever the files came from
    name: str
    #: a folder with config.json and, unless they were left out, tokenizer files and safetensors
    path: Path
    #: digest of what decides the shapes and the arithmetic of the blocks; peers compare it. It says nothing of the
    #: weights' values: two fine-tunes of one model have the same fingerprint, and must not share a name.
    fingerprint: str
    #: the commit on the hub, if the files came from there
    revision: str | None = None

    @property
    def uid_prefix(self) -> str:
        """What stands before `.N` in the hivemind UIDs of the model's blocks."""
        return uid_prefix(self.name)

    def config(self) -> dict[str, Any]:
        """The content of config.json."""
        return read_config(self.path)

    @property
    def blocks(self) -> int:
        """How many blocks the model has. Raises `ModelError`."""
        blocks = _first(_of_text(self.config()), *_BLOCKS)
        if not isinstance(blocks, int):
            raise ModelError(f"{self.path} does not say how many blocks {self.name} has")
        return blocks


def resolve(
    name: str,
    *,
    revision: str | None = None,
    token: str | None = None,
    weights: bool = True,
    progress: Progress = silent,
) -> ModelFiles:
    """Find the model `name`, fetch it if it is not here yet, and say where it lies.

    `name` is one of the demo's names, the path of a folder, or a hub id, tried in this order; write `./smollm2` for a
    folder that is called as the demo. `revision` and `token` are the hub's. Without `weights` only the configuration
    and the tokenizer are fetched (the demo always comes whole). Raises ModelError, with what to do about it.
    """
    if name.lower() in DEMO_NAMES:
        from lilliput.models import demo

        return _described(DEMO, demo.fetch(progress))
    if not name.strip():
        raise ModelError(f"The model's name is empty. {_WHAT_IS_A_NAME}")
    folder = Path(name).expanduser()
    if folder.is_dir():
        check_folder(folder, weights=weights)
        return _described(_name_of(folder), folder)
    if folder.exists():
        raise ModelError(f"{name} is a file, not a model. Give the folder that holds the model's config.json.")
    if name.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(name):
        raise ModelError(f"There is no folder {name}. {_WHAT_IS_A_NAME}")
    folder = _from_hub(name, revision, token, weights, progress)
    check_folder(folder, weights=weights)
    commit = folder.name if re.fullmatch(r"[0-9a-f]{40}", folder.name) else revision
    return _described(name.rpartition("/")[2], folder, commit)


_WHAT_IS_A_NAME = (
    "A model is `smollm2` (the demo), a folder with config.json and safetensors, or a hub id such as `org/name`."
)


def uid_prefix(name: str) -> str:
    """`name` as the first part of hivemind UIDs (`PREFIX.N`), which may hold no dot."""
    return name.replace(".", "-")


def cache_folder() -> Path:
    """Where Lilliput keeps what it may compute or fetch again."""
    if chosen := os.environ.get("LILLIPUT_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "lilliput"


def read_config(folder: Path) -> dict[str, Any]:
    """The content of a model folder's config.json."""
    return _read_json(folder / "config.json", "The folder of a model holds a config.json.")


def weight_files(folder: Path) -> list[str]:
    """The names of the safetensors files that the model in `folder` consists of, whether they are there or not."""
    if not (folder / INDEX).exists():
        return [SINGLE]
    weight_map = _read_json(folder / INDEX, "Fetch the model again.").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{folder / INDEX} names no files in its weight_map. Fetch the model again.")
    return sorted(set(weight_map.values()))


def check_folder(folder: Path, *, weights: bool = True) -> None:
    """Raise ModelError unless `folder` holds a model this program can serve."""
    reason = refusal(read_config(folder))
    if reason is not None:
        raise UnsupportedModel(f"{_name_of(folder)} cannot be served: {reason}.")
    if not weights:
        return
    missing = [file for file in weight_files(folder) if not (folder / file).is_file()]
    if not missing:
        return
    if missing != [SINGLE]:
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise ModelError(f"{folder} lacks {shown}, which its {INDEX} names. Fetch the model again.")
    if any(any(folder.glob(pattern)) for pattern in PICKLED):
        raise ModelError(f"{folder} holds only pickled weights. {_NO_PICKLES}")
    raise ModelError(f"{folder} holds no weights: neither {SINGLE} nor {INDEX} is there.")


_NO_PICKLES = (
    "A pickled file can run any program when it is opened, so it is not read. Use a version of the model in "
    "safetensors, or load it once with transformers and call save_pretrained."
)


#: what configurations call the number of blocks
_BLOCKS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


def _of_text(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of the language model, if there are others beside it."""
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else config


def _first(config: dict[str, Any], *names: str, default: object = None) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), default)


def fingerprint(config: dict[str, Any]) -> str:
    """A short digest of what in a config.json decides the shapes and the arithmetic of the blocks.

    Facts that a config leaves at their defaults count as if they were written, so a config that another transformers
    release saved again has the same fingerprint. Dtype, token ids and the like do not count.
    """
    c = _of_text(config)

    def first(*names: str, default: object = None) -> Any:
        return _first(c, *names, default=default)

    hidden, heads = first("hidden_size", "n_embd", "d_model"), first("num_attention_heads", "n_head", "n_heads")
    rope = {**(c.get("rope_scaling") or {}), **(c.get("rope_parameters") or {})}
    rope.setdefault("rope_theta", c.get("rope_theta"))
    rope.setdefault("rope_type", rope.pop("type", "default"))
    facts = {
        "type": c.get("model_type"),
        "hidden": hidden,
        "blocks": first(*_BLOCKS),
        "heads": heads,
        "kv_heads": first("num_key_value_heads", default=heads),
        "head": first("head_dim", default=hidden // heads if hidden and heads else None),
        "inner": first("intermediate_size", "n_inner", "ffn_dim"),
        "vocabulary": c.get("vocab_size"),
        "epsilon": first("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps"),
        "rope": {key: float(v) if isinstance(v, int) else v for key, v in rope.items() if v is not None},
        "experts": first("num_local_experts", "num_experts", "n_routed_experts"),
        "experts_per_token": first("num_experts_per_tok"),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def out_of_space(error: BaseException) -> bool:
    """Whether `error`, or what caused it, is a full disk or a used-up quota."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if "No space left on device" in str(seen):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def _described(name: str, folder: Path, revision: str | None = None) -> ModelFiles:
    return ModelFiles(name, folder.resolve(), fingerprint(read_config(folder)), revision)


def _name_of(folder: Path) -> str:
    """A folder's own name; for a snapshot in the hub's cache (`models--ORG--NAME/snapshots/COMMIT`) the model's."""
    folder = folder.resolve()
    repository = _HUB_SNAPSHOT.fullmatch(folder.parent.parent.name)
    return repository["name"] if repository and folder.parent.name == "snapshots" else folder.name


def _read_json(file: Path, hint: str) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{file.parent} has no {file.name}. {hint}") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file} is not a JSON object. {hint}")
    return content


def _from_hub(name: str, revision: str | None, token: str | None, weights: bool, progress: Progress) -> Path:
    """The folder of a snapshot in the hub's own cache, with the files that are asked for."""
    progress(f"looking up {name}", 0, None)

    def download(patterns: Iterable[str]) -> Path:
        from huggingface_hub import snapshot_download

        bars = _reporting_bars(lambda done, total: progress(f"downloading {name}", done, total))
        patterns = list(patterns)
        return Path(snapshot_download(name, revision=revision, token=token, allow_patterns=patterns, tqdm_class=bars))

    try:
        folder = download(LIGHT_FILES)
        if not weights or not (folder / "config.json").exists():
            return folder
        check_folder(folder, weights=False)
        progress(f"downloading {name}", 0, None)  # older releases of the client count files, not bytes
        folder = download(weight_files(folder))
        if not any((folder / file).exists() for file in weight_files(folder)):
            from huggingface_hub import HfApi

            there = HfApi(token=token).list_repo_files(name, revision=revision)
            if any(Path(file).match(pattern) for file in there for pattern in PICKLED):
                raise ModelError(f"{name} has only pickled weights on the hub. {_NO_PICKLES}")
        return folder
    except ModelError:
        raise
    except Exception as error:  # the hub's client raises what its HTTP library of the day raises
        raise _hub_error(name, revision, error) from error


def _reporting_bars(report: Callable[[int, int | None], None]) -> type:
    """A class of tqdm bars that draw nothing and report the bytes of the bar that is furthest."""
    from tqdm.auto import tqdm

    most = 0

    class Bar(tqdm):  # type: ignore[type-arg,misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            self._bytes = kwargs.get("unit") == "B"
            super().__init__(*args, **{**kwargs, "disable": True})
            self.n = kwargs.get("initial") or 0  # a disabled bar does not count by itself

        def update(self, n: float | None = 1) -> bool | None:
            nonlocal most
            self.n += n or 0
            if self._bytes and self.n >= most:
                most = int(self.n)
                report(most, int(self.total) if self.total else None)
            return None

    return Bar


def _hub_error(name: str, revision: str | None, error: Exception) -> ModelError:
    """What a person should know about a failed download."""
    from huggingface_hub import errors as hub

    if out_of_space(error):
        return ModelError(f"The disk is full: {name} does not fit. Free some room, or set HF_HOME to another disk.")
    if isinstance(error, hub.GatedRepoError):
        return ModelError(
            f"{name} is gated: accept its terms on its page on the hub, then run `hf auth login` or set HF_TOKEN."
        )
    if isinstance(error, hub.RevisionNotFoundError):
        return ModelError(f"{name} has no revision {revision}.")
    if isinstance(error, hub.RepositoryNotFoundError | hub.HFValidationError):
        return ModelError(
            f"The hub knows no model {name}, or it is private (then run `hf auth login` or set HF_TOKEN). "
            f"{_WHAT_IS_A_NAME}"
        )
    if isinstance(error, hub.LocalEntryNotFoundError | hub.OfflineModeIsEnabled):
        return ModelError(
            f"{name} is not on this machine, and the hub cannot be reached. Check the network, or give a folder. "
            f"`smollm2` (the demo) does not come from the hub."
        )
    reason = str(error).strip().splitlines() or [""]
    return ModelError(f"{name} could not be fetched from the hub: {type(error).__name__}: {reason[0]}")
