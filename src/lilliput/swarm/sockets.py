"""Socket files that hivemind's processes leave in the temporary folder when they are killed."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

_FOLDER, _PATTERN = Path("/tmp"), "hivemind-p2p*.sock"  # hivemind offers no other place
_BOUND = Path("/proc/net/unix")


def remove_stale_sockets() -> int:
    """Remove our own user's socket files that no process listens on any more. Returns how many there were."""
    return sum(_remove(path) for path in _candidates())


def _candidates() -> Iterator[Path]:
    bound = _bound()
    for path in _FOLDER.glob(_PATTERN):
        with contextlib.suppress(OSError):
            if str(path) not in bound and path.lstat().st_uid == os.getuid():
                yield path


def _bound() -> set[str]:
    """The sockets' names that processes have now, whether they listen already or not."""
    with contextlib.suppress(OSError):  # elsewhere than on Linux, only connecting tells
        return {line.rsplit(maxsplit=1)[-1] for line in _BOUND.read_text().splitlines()}
    return set()


def _remove(path: Path) -> bool:
    # a process in another network namespace is not in the list, but can be connected to
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
        probe.settimeout(0.5)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            if str(path) in _bound():  # it was made after we had looked, and does not listen yet
                return False
            with contextlib.suppress(OSError):
                path.unlink()
                return True
        except OSError:
            pass
    return False
