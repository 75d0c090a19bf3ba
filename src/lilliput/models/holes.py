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

from lilliput.errors import ModelError, UnsupportedModel
from lilliput.models import quantized_checkpoint
from lilliput.models.checkpoint import Part, view
from lilliput.models.families import family_of
from lilliput.models.sources import ModelFiles

#: transformers replaces functions of its own while it makes a model: two threads at once would leave them replaced
_loading = threading.Lock()


@contextlib.contextmanager
def building() -> Iterator[None]:
    """In the block, this thread alone makes models, and transformers is quiet."""
    with _loading, _quiet_transformers():
        yield


Punch = Callable[[PreTrainedModel], None]


class PassThrough(nn.Module):
    """Stands for a block that another machine holds: returns its hidden states unchanged.

    :param stand_in: computes something in place of all blocks, from what a block is called with
    :ivar tuples: the family's blocks return tuples
    """

    def __init__(self, block: nn.Module, stand_in: nn.Module | None = None) -> None:
        super().__init__()
        self.stand_in = stand_in
        self.tuples = False
        self.attention_type = getattr(block, "attention_type", None)  # for releases before 5, whose models ask for it

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.stand_in is not None:
            hidden_states = self.stand_in(hidden_states, *args, **kwargs)
        return (hidden_states,) if self.tuples else hidden_states


class NoPositions(nn.Module):
    """Stands for an embedding: of positions, it would be added; of tokens, nobody asks."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(1)


def read_config(files: ModelFiles) -> PretrainedConfig:
    """The text model's configuration, which says nothing of fewer bits: transformers is not shown any."""
    try:
        config = transformers.AutoConfig.from_pretrained(files.path, local_files_only=True)
    except (OSError, ValueError, KeyError) as e:
        raise ModelError(f"cannot read the configuration of {files.name} in {files.path}: {e}") from e
    text = config.get_text_config(decoder=True)
    vars(text).pop("quantization_config", None)
    return text


def base_of(model: PreTrainedModel) -> PreTrainedModel:
    """The model below the head, which holds the blocks: embedding, blocks, final norm. Raises `ModelError`."""
    # not `base_model`, which is one floor too high for OPT and names the wrong thing in some releases' Gemma 3
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and _blocks_in(module) is not None:
            return module
    raise UnsupportedModel(
        f"{type(model).__name__} cannot be served: it keeps its blocks in a way that is not understood"
    )


def blocks_of(model: PreTrainedModel) -> nn.ModuleList:
    """The list of a model's blocks. Raises `ModelError`."""
    blocks = _blocks_in(base_of(model))
    assert blocks is not None
    return blocks


def _blocks_in(module: PreTrainedModel) -> nn.ModuleList | None:
    """The list of the blocks that `module` holds directly, or None."""
    count = getattr(module.config, "num_hidden_layers", None)
    lists = (child for child in module.children() if isinstance(child, nn.ModuleList) and len(child) == count)
    return next(lists, None)


def keep_span(start: int, end: int) -> Punch:
    """Leave only blocks `[start, end)`: what a server holds."""

    def punch(model: PreTrainedModel) -> None:
        base, blocks = base_of(model), blocks_of(model)
        for index, block in enumerate(blocks):
            if not start <= index < end:
                blocks[index] = PassThrough(block)
        for name, child in list(base.named_children()):
            if isinstance(child, nn.Embedding):
                setattr(base, name, NoPositions())
            elif child is not blocks and any(True for _ in child.parameters()):
                setattr(base, name, nn.Identity())  # a norm or a projection before the blocks, or after them

    return punch


def keep_ends(first_block: nn.Module) -> Punch:
    """Leave embedding, final norm and head: what a client holds. `first_block` stands for all blocks."""

    def punch(model: PreTrainedModel) -> None:
        blocks = blocks_of(model)
        for index, block in enumerate(blocks):
            blocks[index] = PassThrough(block, None if index else first_block)

    return punch


def load_with_holes(
    files: ModelFiles,
    auto: Any,
    punch: Punch,
    part: Part,
    *,
    dtype: torch.dtype,
    attention: str,
) -> PreTrainedModel:
    """Build `auto`'s model for these files, punch the holes, and read what is left.

    :param part: what is left; the model's other files need not be there
    :param auto: `transformers.AutoModel` (no head) or `transformers.AutoModelForCausalLM`
    :param attention: the name of a registered attention implementation
    """
    config = read_config(files)
    family_of(config)  # some families must be prepared before they are built
    family = _class_of(files.name, auto, config)

    def init(self: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
        family.__init__(self, *args, **kwargs)
        punch(self)

    holed: Any = type(family.__name__, (family,), {"__init__": init, "__module__": family.__module__})
    try:
        tensors = quantized_checkpoint.read(files.config(), files.path, part, dtype)
        with _loading, _quiet_transformers(), view(files.path, part) as folder:
            model, report = holed.from_pretrained(
                folder if tensors is None else None,
                state_dict=tensors,
                config=config,
                dtype=dtype,
                attn_implementation=attention,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # named below
            )
    except (OSError, ValueError, KeyError, ImportError, AttributeError, RuntimeError) as e:
        if e.args == (attention,):
            raise UnsupportedModel(
                f"{files.name} cannot be served with transformers {transformers.__version__}: "
                f"its attention is the family's own there"
            ) from e
        raise ModelError(f"cannot load {files.name} from {files.path}: {e}") from e
    if wrong := sorted(report.get("mismatched_keys") or (), key=str):
        name, *shapes = [wrong[0]] if isinstance(wrong[0], str) else wrong[0]  # releases before 5 tell names only
        found = f" {list(shapes[0])} and should have {list(shapes[1])}" if shapes else " that it should not have"
        raise ModelError(
            f"{files.path} does not belong to its config.json: {name} has the shape{found}. Fetch the model again."
        )
    missing = sorted(report["missing_keys"])  # transformers would go on with random numbers in their place
    if missing:
        raise ModelError(f"{files.path} lacks {len(missing)} tensors of {files.name}, such as {missing[0]}")
    _learn_tuples(base_of(model), blocks_of(model))
    return model.eval().requires_grad_(False)  # type: ignore[no-any-return]


#: by `auto` and the class of the configuration: found out by building a model, which takes as long as reading a block
_classes: dict[tuple[Any, type], type[PreTrainedModel]] = {}


def _class_of(name: str, auto: Any, config: PretrainedConfig) -> type[PreTrainedModel]:
    """The class of the models that `auto` makes for such configurations."""
    key = auto, type(config)
    if key not in _classes:
        try:
            with _loading, torch.device("meta"):
                _classes[key] = type(auto.from_config(config))
        except (ValueError, KeyError, ImportError, AttributeError) as e:
            raise ModelError(f"transformers {transformers.__version__} cannot build {name}: {e}") from e
    return _classes[key]


class _Learned(Exception):
    """Enough was seen of a call."""


def _learn_tuples(base: Any, blocks: nn.ModuleList) -> None:
    """Find out whether blocks return tuples in this family and release: the base model takes the first element then.

    So the first block is made to return one, and the second looks what it gets.
    """
    ours = [block for block in blocks if isinstance(block, PassThrough)]
    if not ours or len(blocks) < 2:
        return

    hidden = torch.zeros(1, 1, base.config.hidden_size, dtype=base.dtype)
    ends = isinstance(base.get_input_embeddings(), nn.Embedding)
    call = {"input_ids": torch.zeros(1, 1, dtype=torch.int64)} if ends else {"inputs_embeds": hidden}

    def look(_: Any, args: Any, kwargs: Any) -> Any:
        seen = args[0] if args else kwargs.get("hidden_states")
        for block in ours:
            block.tuples = isinstance(seen, torch.Tensor)
        raise _Learned

    real = blocks[0], blocks[1]
    blocks[0], blocks[1] = PassThrough(real[0]), PassThrough(real[1])
    blocks[0].register_forward_hook(lambda *_: (hidden,))
    blocks[1].register_forward_pre_hook(look, with_kwargs=True)
    try:
        with contextlib.suppress(_Learned), torch.no_grad():
            base(**call, use_cache=False)
    except Exception as e:  # whatever a family's code may stumble over
        raise UnsupportedModel(
            f"{type(base).__name__} cannot be served: it does not run without its blocks: {e}"
        ) from e
    finally:
        blocks[0], blocks[1] = real


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
