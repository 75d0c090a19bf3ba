"""What some families of models need beyond their own class. Most need nothing, and have no file here.

A family has a file if its blocks compute their attention themselves instead of through transformers' attention
interface; the file gives its blocks an attention that does.
"""

from __future__ import annotations

import importlib

from transformers import PretrainedConfig

from lilliput.models.families.family import Family

#: files of this folder, each named as the `model_type` of its family's configuration
ADAPTED = frozenset({"bloom", "falcon", "mpt"})

_PLAIN = Family()


def family_of(config: PretrainedConfig) -> Family:
    """What the family of this configuration needs."""
    if config.model_type not in ADAPTED:
        return _PLAIN
    family: Family = importlib.import_module(f"{__name__}.{config.model_type}").FAMILY
    return family
