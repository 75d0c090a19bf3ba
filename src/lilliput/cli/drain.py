"""`lilliput drain`: have a server of this machine leave without anybody noticing."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Annotated

import typer

from lilliput.errors import BadRequest

if TYPE_CHECKING:
    import psutil

#: beyond the time that the server gives its sessions (seconds)
_WAIT_SECONDS = 600.0
_POLL_SECONDS = 0.1


def drain(pid: Annotated[int, typer.Argument(help="The server's process, as it says when it starts.")]) -> None:
    """Have a server take nothing new, let its sessions move to others, and leave. Waits until it has."""
    import psutil

    try:
        process = psutil.Process(pid)
        words = process.cmdline()
    except psutil.Error as e:
        raise BadRequest(f"there is no process {pid} on this machine, or it is not yours") from e
    if "serve" not in words or not any("lilliput" in word for word in words):
        raise BadRequest(f"process {pid} is no Lilliput server")
    try:
        os.kill(pid, signal.SIGTERM)
    except PermissionError as e:
        raise BadRequest(f"process {pid} belongs to somebody else") from e
    typer.echo(f"Server {pid} takes nothing new, and leaves when its sessions have moved.")
    until = time.monotonic() + _WAIT_SECONDS
    while _lives(process):
        if time.monotonic() > until:
            raise BadRequest(f"server {pid} is still there after {_WAIT_SECONDS:.0f} s")
        time.sleep(_POLL_SECONDS)
    typer.echo("It has left.")


def _lives(process: psutil.Process) -> bool:
    """Whether it runs; one whose parent has not asked how it ended does not."""
    import psutil

    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
