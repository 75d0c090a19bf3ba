"""One model, with holes: a family's own class, with all modules replaced that this process does not need.

A span (on a server) and a model's ends (on a client) are the same Hugging Face model. Whatever is punched out is never
allocated, and `from_pretrained` reads only the tensors that are left, whatever a release of transformers does to their
names or layout on the way.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel  # both names exist in releases before 5, too

from lilliput.errors import ModelError
from lilliput.models.families import family_of
from lilliput.models.sources import ModelFiles

#: transformers replaces functions of its own while it makes a model: two threads at once would leave them replaced
_loading = threading.Lock()

Punch = Callable[[PreTrainedModel], None]


class PassThrough(nn.Module):
    """Stands for a block that another machine holds: returns its hidden states unchanged.

    :param tuples: as the only element of a tuple
    :param stand_in: computes something in place of all blocks, from what a block is called with
    """

    def __init__(self, tuples: bool = False, stand_in: nn.Module | None = None) -> None:
        super().__init__()
        self.tuples, self.stand_in = tuples, stand_in

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.stand_in is not None:
            hidden_states = self.stand_in(hidden_states, *args, **kwargs)
        return (hidden_states,) if self.tuples else hidden_states


class NoPositions(nn.Module):
    """Stands for an embedding: of positions, it would be added; of tokens, nobody asks."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(1)


def read_config(files: ModelFiles) -> PretrainedConfig:
    """The text model's configuration."""
    try:
        config = transformers.AutoConfig.from_pretrained(files.path, local_files_only=True)
    except (OSError, ValueError, KeyError) as e:
        raise ModelError(f"cannot read the configuration of {files.name} in {files.path}: {e}") from e
    return config.get_text_config(decoder=True)


def base_of(model: PreTrainedModel) -> PreTrainedModel:
    """The model below the head: embedding, blocks, final norm."""
    base: Any = getattr(model, model.base_model_prefix, model) if model.base_model_prefix else model
    decoder = getattr(base, "decoder", None)  # opt keeps its blocks one floor lower
    if isinstance(decoder, PreTrainedModel) and blocks_in(decoder) is not None:
        return decoder
    return base  # type: ignore[no-any-return]


def blocks_in(module: nn.Module) -> tuple[str, nn.ModuleList] | None:
    """The name and the list of the blocks that `module` holds directly, or None."""
    config = getattr(module, "config", None)
    count = getattr(config, "num_hidden_layers", None)
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList) and len(child) == count:
            return name, child
    return None


def blocks_of(model: PreTrainedModel) -> nn.ModuleList:
    """The list of a model's blocks."""
    found = blocks_in(base_of(model))
    if found is None:
        raise ModelError(f"{type(model).__name__} keeps its blocks in a way that is not understood")
    return found[1]


def keep_span(start: int, end: int) -> Punch:
    """Leave only blocks `[start, end)`: what a server holds."""

    def punch(model: PreTrainedModel) -> None:
        base, blocks = base_of(model), blocks_of(model)
        tuples = family_of(base.config).tuples
        for index in range(len(blocks)):
            if not start <= index < end:
                blocks[index] = PassThrough(tuples)
        for name, child in list(base.named_children()):
            if isinstance(child, nn.Embedding):
                setattr(base, name, NoPositions())
            elif child is not blocks and any(True for _ in child.parameters()):
                setattr(base, name, nn.Identity())  # a norm or a projection before the blocks, or after them

    return punch


def keep_ends(first_block: nn.Module) -> Punch:
    """Leave embedding, final norm and head: what a client holds. `first_block` stands for all blocks."""

    def punch(model: PreTrainedModel) -> None:
        blocks, tuples = blocks_of(model), family_of(base_of(model).config).tuples
        for index in range(len(blocks)):
            blocks[index] = PassThrough(tuples, None if index else first_block)

    return punch


def load_with_holes(
    files: ModelFiles,
    auto: Any,
    punch: Punch,
    *,
    dtype: torch.dtype,
    attention: str,
) -> PreTrainedModel:
    """Build `auto`'s model for these files, punch the holes, and read what is left.

    :param auto: `transformers.AutoModel` (no head) or `transformers.AutoModelForCausalLM`
    :param attention: the name of a registered attention implementation
    """
    config = read_config(files)
    family_of(config)  # some families must be prepared before they are built
    try:
        with _loading, torch.device("meta"):
            family: type[PreTrainedModel] = type(auto.from_config(config))
    except (ValueError, KeyError, ImportError, AttributeError) as e:
        raise ModelError(f"transformers {transformers.__version__} cannot build {files.name}: {e}") from e

    def init(self: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
        family.__init__(self, *args, **kwargs)
        punch(self)

    holed: Any = type(family.__name__, (family,), {"__init__": init, "__module__": family.__module__})
    try:
        with _loading, _quiet_transformers():
            model = holed.from_pretrained(
                files.path, config=config, dtype=dtype, attn_implementation=attention, local_files_only=True
            )
    except (OSError, ValueError, KeyError, RuntimeError) as e:
        raise ModelError(f"cannot load {files.name} from {files.path}: {e}") from e
    missing = [name for name, p in model.named_parameters() if p.device.type == "meta"]
    if missing:
        raise ModelError(f"{files.path} lacks {len(missing)} tensors of {files.name}, such as {missing[0]}")
    return model.eval().requires_grad_(False)  # type: ignore[no-any-return]


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Unexpected tensors are the point of a model with holes; no table of them, no bar for a second's work."""
    log = transformers.utils.logging
    verbosity, bar = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        if bar:
            log.enable_progress_bar()
