"""Python's garbage collector, out of the way while modules are imported.

Importing torch, transformers and hivemind makes a million objects that all stay. The collector would look through them
again and again, which takes a third of the time that the imports take, and later a tenth of a second now and then.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Collect no garbage in the block; what is alive at its end is never looked at again (`gc.freeze`)."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
