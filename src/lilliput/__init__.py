"""Many small machines hold one giant language model."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

# Importing torch takes seconds; `import lilliput` does not.
_LAZY = {
    "AutoDistributedModelForCausalLM": "lilliput.client.model",
    "InferenceSession": "lilliput.client.session",
    "RemoteSequential": "lilliput.client.sequential",
    "Server": "lilliput.server.server",
    "ServerOptions": "lilliput.server.server",
    "errors": "lilliput.errors",
}

__all__ = [*sorted(_LAZY), "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'lilliput' has no attribute {name!r}")
    module = importlib.import_module(_LAZY[name])
    value = module if name == "errors" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
