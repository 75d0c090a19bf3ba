"""Files from the Hugging Face hub, kept in the hub's own cache: only those asked for, resumed, and verified."""

from __future__ import annotations

import errno
import hashlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lilliput.errors import ModelError
from lilliput.models.checkpoint import NO_PICKLES, PICKLED, SINGLE, Shapes
from lilliput.models.progress import Progress

#: what a model's folder holds besides its weights; no Python files: nothing that was downloaded is executed
LIGHT_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_CHECKSUM = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


@dataclass(frozen=True)
class Hub:
    """A model on the hub. `revision`: a branch, tag or commit; None for the newest."""

    name: str
    revision: str | None = None
    token: str | None = field(default=None, repr=False)

    def folder(self, progress: Progress) -> Path:
        """The folder of the snapshot, with configuration and tokenizer. Raises `ModelError`."""
        progress(f"looking up {self.name}", 0, None)
        return self._download(LIGHT_FILES, progress)

    def at(self, folder: Path) -> Hub:
        """The same at the commit of that snapshot, so that whatever is fetched later belongs to it."""
        return Hub(self.name, folder.name if _COMMIT.fullmatch(folder.name) else self.revision, self.token)

    def bring(self, folder: Path, files: Iterable[str], progress: Progress) -> None:
        """Have these files in the folder, each downloaded (on from where it was interrupted) unless it is there.

        Raises `ModelError`, also if what came is not what the hub says it is; that is thrown away then.
        """
        new = [file for file in files if not (folder / file).is_file()]
        if not new:
            return
        for number, file in enumerate(new, start=1):
            stage = f"downloading {self.name}, {file}" + (f" ({number} of {len(new)})" if len(new) > 1 else "")
            self._bring(folder, file, lambda done, total, stage=stage: progress(stage, done, total))  # type: ignore[misc]
        self._download(new, progress)  # only gives what has come its place, and brings what came in no other way

    def _bring(self, folder: Path, file: str, report: Callable[[int, int | None], None]) -> None:
        """Download one file into the cache's contents, on from where an earlier process was interrupted.

        The hub's client goes on by itself when a connection breaks, but begins again in another process. Its cache
        names a content by its checksum, and it looks there before it downloads.
        """
        from urllib.parse import urlparse

        import filelock
        from huggingface_hub import get_hf_file_metadata, hf_hub_url
        from huggingface_hub.file_download import http_get
        from huggingface_hub.utils import build_hf_headers

        contents = folder.parent.parent / "blobs"
        url = hf_hub_url(self.name, file, revision=self.revision)
        try:
            facts = get_hf_file_metadata(url, token=self.token)
            if (
                (getattr(facts, "xet_file_data", None) is not None and _has_xet())
                or not facts.size
                or not _CHECKSUM.fullmatch(facts.etag or "")
            ):
                return  # the client's own way
            content = contents / str(facts.etag)
            headers = build_hf_headers(token=self.token)
            if urlparse(url).netloc != urlparse(facts.location).netloc:
                headers.pop("authorization", None)  # not for the file's keeper
            with filelock.FileLock(contents / f"{facts.etag}.part.lock"):
                if content.exists():
                    return
                part = contents / f"{facts.etag}.part"
                with part.open("ab") as opened:
                    begun = opened.tell()
                    report(begun, facts.size)
                    if begun < facts.size:
                        http_get(
                            facts.location,
                            opened,
                            headers=headers,
                            resume_size=begun,
                            expected_size=facts.size,
                            **_bars(http_get, report),
                        )
                if not _has_checksum(part, content.name):
                    part.unlink()
                    raise ModelError(
                        f"{file} of {self.name} arrived damaged: its checksum is not the hub's. It was thrown away; "
                        f"try again."
                    )
                part.chmod(0o644)
                part.rename(content)
            (contents / f"{facts.etag}.part.lock").unlink(missing_ok=True)
        except Exception as error:
            if file == SINGLE:
                self._refuse_pickles()
            raise _explained(self.name, self.revision, error) from error

    def shapes(self, file: str) -> Shapes:
        """The shapes of a file's tensors, from its first bytes. Raises `ModelError`."""
        from huggingface_hub import HfApi

        try:
            found = HfApi().parse_safetensors_file_metadata(
                self.name, file, revision=self.revision, token=self.token or None
            )
        except Exception as error:
            if file == SINGLE:
                self._refuse_pickles()
            raise _explained(self.name, self.revision, error) from error
        return {name: tuple(tensor.shape) for name, tensor in found.tensors.items()}

    def _download(self, patterns: Iterable[str], progress: Progress) -> Path:
        from huggingface_hub import snapshot_download

        bars = _reporting_bars(lambda done, total: progress(f"downloading {self.name}", done, total))
        try:
            return Path(
                snapshot_download(
                    self.name,
                    revision=self.revision,
                    token=self.token,
                    allow_patterns=list(patterns),
                    tqdm_class=bars,
                )
            )
        except Exception as error:  # the hub's client raises what its HTTP library of the day raises
            raise _explained(self.name, self.revision, error) from error

    def _refuse_pickles(self) -> None:
        from huggingface_hub import HfApi

        try:
            there = HfApi(token=self.token).list_repo_files(self.name, revision=self.revision)
        except Exception as error:
            raise _explained(self.name, self.revision, error) from error
        if any(Path(file).match(pattern) for file in there for pattern in PICKLED):
            raise ModelError(f"{self.name} has only pickled weights on the hub. {NO_PICKLES}")


def discard(file: Path) -> None:
    """Throw a downloaded file away: its place in the snapshot, and its content, to which that points."""
    content = file.resolve()
    file.unlink(missing_ok=True)
    if content.parent.name == "blobs":
        content.unlink(missing_ok=True)


def _has_xet() -> bool:
    """Whether the hub's client fetches what the hub keeps in its Xet storage from there, and not over plain HTTP."""
    from importlib.util import find_spec

    from huggingface_hub import constants

    return not getattr(constants, "HF_HUB_DISABLE_XET", False) and find_spec("hf_xet") is not None


def _has_checksum(file: Path, checksum: str) -> bool:
    """The hub's ETag is the SHA-256 of a large file, git's SHA-1 of a small one."""
    with file.open("rb") as opened:
        if len(checksum) == 64:
            return hashlib.file_digest(opened, "sha256").hexdigest() == checksum
        digest = hashlib.sha1(b"blob %d\0" % file.stat().st_size, usedforsecurity=False)
        while part := opened.read(1 << 20):
            digest.update(part)
        return digest.hexdigest() == checksum


def out_of_space(error: BaseException) -> bool:
    """Whether `error`, or what caused it, is a full disk or a used-up quota."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if "No space left on device" in str(seen):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def _bars(download: Callable[..., None], report: Callable[[int, int | None], None]) -> dict[str, Any]:
    """How `download` tells of its progress: to `report`, or on a bar of its own in releases of the client before 1."""
    from inspect import signature

    return {"tqdm_class": _reporting_bars(report)} if "tqdm_class" in signature(download).parameters else {}


def _reporting_bars(report: Callable[[int, int | None], None]) -> type:
    """A class of tqdm bars that draw nothing and report the bytes of the bar that is furthest."""
    from tqdm.auto import tqdm

    most = 0

    class Bar(tqdm):  # type: ignore[type-arg,misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            self._bytes = kwargs.get("unit") == "B"
            super().__init__(*args, **{**kwargs, "disable": True})
            self.n = kwargs.get("initial") or 0  # a disabled bar does not count by itself

        def update(self, n: float | None = 1) -> bool | None:
            nonlocal most
            self.n += n or 0
            if self._bytes and self.n >= most:
                most = int(self.n)
                report(most, int(self.total) if self.total else None)
            return None

    return Bar


def _explained(name: str, revision: str | None, error: Exception) -> ModelError:
    """What a person should know about a failed download."""
    from huggingface_hub import errors as hub

    if isinstance(error, ModelError):
        return error
    if out_of_space(error):
        return ModelError(f"The disk is full: {name} does not fit. Free some room, or set HF_HOME to another disk.")
    if isinstance(error, hub.GatedRepoError):
        return ModelError(
            f"{name} is gated: accept its terms on its page on the hub, then run `hf auth login` or set HF_TOKEN."
        )
    if isinstance(error, hub.RevisionNotFoundError):
        return ModelError(f"{name} has no revision {revision}.")
    if isinstance(error, hub.RepositoryNotFoundError | hub.HFValidationError):
        return ModelError(
            f"The hub knows no model {name}, or it is private (then run `hf auth login` or set HF_TOKEN). "
            f"{WHAT_IS_A_NAME}"
        )
    if isinstance(error, hub.LocalEntryNotFoundError | hub.OfflineModeIsEnabled):
        return ModelError(
            f"{name} is not on this machine, and the hub cannot be reached. Check the network, or give a folder. "
            f"`smollm2` (the demo) does not come from the hub."
        )
    reason = str(error).strip().splitlines() or [""]
    return ModelError(
        f"{name} could not be fetched from the hub: {type(error).__name__}: {reason[0]} "
        f"What has come is kept: try again, and it goes on from there."
    )


WHAT_IS_A_NAME = (
    "A model is `smollm2` (the demo), a folder with config.json and safetensors, a .gguf file, or a hub id such as "
    "`org/name`."
)
