"""From a model's name to its files.

A name is the demo's (`smollm2`), a local folder, a `.gguf` file, or a hub id (`org/name`). Whatever it is, what comes
out is a folder in the layout of the Hugging Face hub: config.json, tokenizer files, safetensors. Weights come into it
part by part, as they are asked for. Importing this module is cheap.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from lilliput.errors import ModelError, UnsupportedModel
from lilliput.models import checkpoint
from lilliput.models.checkpoint import Damaged, Part, Shapes, weight_files
from lilliput.models.facts import BLOCKS, HEADS, HIDDEN, ModelFacts, block_count, describe, first, text_config
from lilliput.models.hub import WHAT_IS_A_NAME, Hub, discard
from lilliput.models.progress import Progress, silent
from lilliput.models.quantized_checkpoint import plain_shapes
from lilliput.models.refusal import refusal

#: the demo model's canonical name, and the other names by which it is known (in lower case)
DEMO = "SmolLM2-135M-Instruct"
DEMO_NAMES = frozenset({"smollm2", DEMO.lower(), f"huggingfacetb/{DEMO}".lower()})

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.\-]*(/[A-Za-z0-9][\w.\-]*)?")
_HUB_SNAPSHOT = re.compile(r"models--(?:.+--)?(?P<name>.+)")


class Origin(Protocol):
    """Where weights come from that are not in the model's folder yet."""

    def bring(self, folder: Path, files: Iterable[str], progress: Progress) -> None:
        """Have these files in the folder. Raises `ModelError`."""

    def shapes(self, file: str) -> Shapes:
        """The shapes of the tensors in a file, without bringing it. Raises `ModelError`."""


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
    #: where weights that are not in `path` come from; None: from nowhere
    origin: Origin | None = field(default=None, compare=False)

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
        blocks = block_count(self.config())
        if blocks is None:
            raise ModelError(f"{self.path} does not say how many blocks {self.name} has")
        return blocks

    @property
    def hidden_size(self) -> int:
        """The width of the hidden states. Raises `ModelError`."""
        width = first(text_config(self.config()), *HIDDEN)
        if not isinstance(width, int):
            raise ModelError(f"{self.path} does not say how wide the hidden states of {self.name} are")
        return width

    def fetch(self, part: Part, progress: Progress = silent) -> None:
        """Have the files with the part's weights here, and see that they are whole: blocks `(start, end)`, the model's
        `"ends"`, or `"all"`. Raises `ModelError`, which names what is missing or damaged.
        """
        if isinstance(part, tuple) and not 0 <= part[0] < part[1] <= self.blocks:
            raise ModelError(f"{self.name} has blocks 0:{self.blocks}; {part[0]}:{part[1]} is no part of them")
        if self.origin is not None:
            self.origin.bring(self.path, weight_files(self.path, part), progress)
        checkpoint.check_there(self.path, part)
        try:
            checkpoint.check_whole(self.path, part)
        except Damaged as error:
            if self.origin is None:
                raise
            discard(self.path / error.file)
            raise ModelError(f"{error} It was thrown away already; try again.") from None

    def facts(self) -> ModelFacts:
        """What decides how large a span is: from configuration and headers. Raises `ModelError`."""
        shapes: Shapes = {}
        for file in weight_files(self.path):
            if self.origin is None or (self.path / file).is_file():
                checkpoint.check_there(self.path)
                shapes |= checkpoint.header(self.path / file)
            else:
                shapes |= self.origin.shapes(file)
        config = self.config()
        return describe(self.name, config, plain_shapes(config, shapes))


def resolve(
    name: str,
    *,
    revision: str | None = None,
    token: str | None = None,
    weights: bool = True,
    progress: Progress = silent,
) -> ModelFiles:
    """Find the model `name`, fetch it if it is not here yet, and say where it lies.

    `name` is one of the demo's names, the path of a folder or a .gguf file, or a hub id, tried in this order; write
    `./smollm2` for a folder that is called as the demo. `revision` and `token` are the hub's. Without `weights` only
    configuration and tokenizer are fetched (the demo always comes whole): `fetch` of what is returned brings a part of
    the weights. Raises ModelError, with what to do about it.
    """
    if name.lower() in DEMO_NAMES:
        from lilliput.models import demo

        if revision:
            raise ModelError(f"{DEMO}, the demo, does not come from the hub and has no revision {revision}.")
        return _described(DEMO, demo.fetch(progress))
    if not name.strip():
        raise ModelError(f"The model's name is empty. {WHAT_IS_A_NAME}")
    files = _found(name, revision, token, progress)
    check_config(files.path)
    if weights:
        files.fetch("all", progress)
    return files


def _found(name: str, revision: str | None, token: str | None, progress: Progress) -> ModelFiles:
    path = Path(name).expanduser()
    if revision and path.exists():
        raise ModelError(f"{name} is on this machine and has no revision {revision}: only models of the hub have some.")
    if path.is_dir():
        return _described(_name_of(path), path)
    if path.suffix.lower() == ".gguf" and path.is_file():
        from lilliput.models.gguf_file import GGUFFile

        file = GGUFFile(path)
        return _described(file.name, file.folder(progress), origin=file)
    if path.exists():
        raise ModelError(
            f"{name} is a file, not a model. Give the folder that holds the model's config.json, or a .gguf file."
        )
    if name.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(name):
        what = "file" if path.suffix.lower() == ".gguf" else "folder"
        raise ModelError(f"There is no {what} {name}. {WHAT_IS_A_NAME}")
    hub = Hub(name, revision, token)
    folder = hub.folder(progress)
    hub = hub.at(folder)
    return _described(name.rpartition("/")[2], folder, hub.revision, hub)


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
    return checkpoint.read_json(folder / "config.json", "The folder of a model holds a config.json.")


def check_config(folder: Path) -> None:
    """Raise ModelError unless `folder` has the configuration of a model that this program can serve."""
    reason = refusal(read_config(folder))
    if reason is not None:
        raise UnsupportedModel(f"{_name_of(folder)} cannot be served: {reason}.")


def fingerprint(config: dict[str, Any]) -> str:
    """A short digest of what in a config.json decides the shapes and the arithmetic of the blocks.

    Facts that a config leaves at their defaults count as if they were written, so a config that another transformers
    release saved again has the same fingerprint. Dtype, token ids and the like do not count.
    """
    c = text_config(config)

    hidden, heads = first(c, *HIDDEN), first(c, *HEADS)
    rope = {**(c.get("rope_scaling") or {}), **(c.get("rope_parameters") or {})}
    rope.setdefault("rope_theta", c.get("rope_theta"))
    rope.setdefault("rope_type", rope.pop("type", "default"))
    facts = {
        "type": c.get("model_type"),
        "hidden": hidden,
        "blocks": first(c, *BLOCKS),
        "heads": heads,
        "kv_heads": first(c, "num_key_value_heads", default=heads),
        "head": first(c, "head_dim", default=hidden // heads if hidden and heads else None),
        "inner": first(c, "intermediate_size", "n_inner", "ffn_dim"),
        "vocabulary": c.get("vocab_size"),
        "epsilon": first(c, "rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps"),
        "rope": {key: float(v) if isinstance(v, int) else v for key, v in rope.items() if v is not None},
        "experts": first(c, "num_local_experts", "num_experts", "n_routed_experts"),
        "experts_per_token": first(c, "num_experts_per_tok"),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _described(name: str, folder: Path, revision: str | None = None, origin: Origin | None = None) -> ModelFiles:
    return ModelFiles(name, folder.resolve(), fingerprint(read_config(folder)), revision, origin)


def _name_of(folder: Path) -> str:
    """A folder's own name; for a snapshot in the hub's cache (`models--ORG--NAME/snapshots/COMMIT`) the model's."""
    folder = folder.resolve()
    repository = _HUB_SNAPSHOT.fullmatch(folder.parent.parent.name)
    return repository["name"] if repository and folder.parent.name == "snapshots" else folder.name
