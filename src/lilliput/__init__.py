"""Many small machines hold one giant language model."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lilliput import errors as errors
    from lilliput.client.connection import Patience as Patience
    from lilliput.client.model import AutoDistributedModelForCausalLM as AutoDistributedModelForCausalLM
    from lilliput.client.sequential import RemoteSequential as RemoteSequential
    from lilliput.client.session import InferenceSession as InferenceSession
    from lilliput.server.server import Server as Server

__version__ = "0.1.0"

# imported when first used: torch, transformers and hivemind take seconds
_HOMES = {
    "AutoDistributedModelForCausalLM": "lilliput.client.model",
    "RemoteSequential": "lilliput.client.sequential",
    "InferenceSession": "lilliput.client.session",
    "Patience": "lilliput.client.connection",
    "Server": "lilliput.server.server",
}

__all__ = [*_HOMES, "__version__", "errors"]


def __getattr__(name: str) -> Any:
    if name == "errors":
        return importlib.import_module("lilliput.errors")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lilliput.collector import collector_paused

    with collector_paused():
        return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
