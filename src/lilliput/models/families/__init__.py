"""What some families of models need beyond their own class. Most need nothing, and have no file here.

A family has a file if its blocks compute their attention themselves instead of through transformers' attention
interface. The file gives them an attention that does, with the weights that they have.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from transformers import PretrainedConfig

#: files of this folder, each named as the `model_type` of its family's configuration
ADAPTED = frozenset({"bloom", "falcon", "mpt"})


def family_of(config: PretrainedConfig) -> ModuleType | None:
    """The file of this configuration's family, or None. It must be there before a model of the family is built."""
    return importlib.import_module(f"{__name__}.{config.model_type}") if config.model_type in ADAPTED else None


def adapt(base: Any, blocks: Sequence[Any]) -> None:
    """Make the blocks of a span, which belong to the model `base`, attend by `lilliput.models.call.attend`."""
    family = family_of(base.config)
    if family is not None:
        family.adapt(base, blocks)
