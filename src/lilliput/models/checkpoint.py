"""The weights in a model's folder: which safetensors files it consists of, and which of them a part of it needs."""

from __future__ import annotations

import contextlib
import json
import math
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from lilliput.errors import ModelError
from lilliput.models.facts import block_of, is_beside_the_text

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
NO_PICKLES = (
    "A pickled file can run any program when it is opened, so it is not read. Use a version of the model in "
    "safetensors, or load it once with transformers and call save_pretrained."
)

#: blocks `[start, end)`, what stands before and after the blocks, or everything
Part = tuple[int, int] | Literal["ends", "all"]
Shapes = dict[str, tuple[int, ...]]

#: what the format allows a header to take
_MOST_HEADER_BYTES = 100_000_000
_BITS = {"BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}


class Damaged(ModelError):
    """A file is not what it should be. `file` is its name."""

    def __init__(self, message: str, file: str) -> None:
        super().__init__(message)
        self.file = file


def read_json(file: Path, hint: str) -> dict[str, Any]:
    """The object in a JSON file. Raises `ModelError`."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{file.parent} has no {file.name}. {hint}") from None
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror or error}. {hint}") from error
    except ValueError as error:
        raise ModelError(f"{file} cannot be read: it is no JSON ({error}). {hint}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file} is not a JSON object. {hint}")
    return content


def weight_map(folder: Path) -> dict[str, str] | None:
    """The file of each tensor, by its name; None where a single file has them all."""
    if not (folder / INDEX).exists():
        return None
    found = read_json(folder / INDEX, "Fetch the model again.").get("weight_map")
    if not isinstance(found, dict) or not found:
        raise ModelError(f"{folder / INDEX} names no files in its weight_map. Fetch the model again.")
    for file in set(found.values()):
        if not isinstance(file, str) or Path(file).name != file:
            raise ModelError(f"{folder / INDEX} names {file!r}, which is no file of this folder.")
    return found


def weight_files(folder: Path, part: Part = "all") -> list[str]:
    """The names of the safetensors files that hold the part's tensors, whether they are there or not."""
    found = weight_map(folder)
    return [SINGLE] if found is None else sorted(set(_of_part(found, part).values()))


def _of_part(tensors: dict[str, str], part: Part) -> dict[str, str]:
    """The part's share of a weight map; all of it if its names are not understood."""
    if part == "all":
        return tensors
    numbers = {name: block_of(name) for name in tensors}
    if part == "ends":
        mine = {n: f for n, f in tensors.items() if numbers[n] is None and not is_beside_the_text(n)}
        return mine if len(mine) < len(tensors) else tensors
    wanted = set(range(*part))
    mine = {n: f for n, f in tensors.items() if numbers[n] in wanted}
    return mine if wanted <= set(numbers.values()) else tensors


def tensors_of(folder: Path, part: Part) -> dict[str, str]:
    """The file of each of the part's tensors, by its name. Raises `ModelError`."""
    names = weight_map(folder)
    return _of_part(dict.fromkeys(header(folder / SINGLE), SINGLE) if names is None else names, part)


def check_there(folder: Path, part: Part = "all") -> None:
    """Raise ModelError unless the part's files are in the folder."""
    missing = [file for file in weight_files(folder, part) if not (folder / file).is_file()]
    if not missing:
        return
    if missing != [SINGLE]:
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise ModelError(f"{folder} lacks {shown}, which its {INDEX} names. Fetch the model again.")
    if any(any(folder.glob(pattern)) for pattern in PICKLED):
        raise ModelError(f"{folder} holds only pickled weights. {NO_PICKLES}")
    raise ModelError(f"{folder} holds no weights: neither {SINGLE} nor {INDEX} is there.")


def check_whole(folder: Path, part: Part = "all") -> None:
    """Raise `Damaged` unless each of the part's files is whole and has the tensors that the index says it has.

    Reads headers only: what was changed inside a tensor is not seen here, but when it is downloaded.
    """
    names = weight_map(folder)
    mine = {} if names is None else _of_part(names, part)
    for file in weight_files(folder, part):
        there = header(folder / file)
        lacking = sorted(name for name, of in mine.items() if of == file and name not in there)
        if lacking:
            raise Damaged(f"{folder / file} lacks the tensor {lacking[0]}, which {INDEX} says it has. {_AGAIN}", file)


_AGAIN = "Delete it and fetch the model again."


def header(file: Path) -> Shapes:
    """The shapes of a safetensors file's tensors. Raises `Damaged` if the file is not whole."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        start = opened.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= _MOST_HEADER_BYTES:
            raise Damaged(f"{file} is damaged: it does not begin as a safetensors file does. {_AGAIN}", file.name)
        content = opened.read(length)
    if len(content) < length:
        raise Damaged(f"{file} is damaged: it ends inside its header, after {size:,} bytes. {_AGAIN}", file.name)
    try:
        tensors = {name: facts for name, facts in json.loads(content).items() if name != "__metadata__"}
        ends = [_checked_end(name, facts) for name, facts in tensors.items()]
        shapes = {name: tuple(int(n) for n in facts["shape"]) for name, facts in tensors.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Damaged(f"{file} is damaged: its header makes no sense ({error}). {_AGAIN}", file.name) from None
    whole = 8 + length + max(ends, default=0)
    if size != whole:
        raise Damaged(f"{file} is damaged: it has {size:,} bytes and should have {whole:,}. {_AGAIN}", file.name)
    return shapes


def _checked_end(name: str, facts: Any) -> int:
    begin, end = facts["data_offsets"]
    bits = _BITS.get(facts["dtype"]) or 8 * _bytes_in_name(facts["dtype"])
    if not 0 <= begin <= end or (math.prod(facts["shape"]) * bits + 7) // 8 != end - begin:
        raise ValueError(f"{name} has another shape than size")
    return int(end)


def _bytes_in_name(dtype: str) -> int:
    """`BF16` has 2, `F8_E4M3` 1."""
    digits = "".join(c for c in dtype.partition("_")[0] if c.isdecimal())
    return int(digits) // 8


@contextlib.contextmanager
def view(folder: Path, part: Part) -> Iterator[Path]:
    """A folder that looks like the model's, with the part's tensors only: no other file is opened while loading."""
    names = weight_map(folder)
    mine = {} if names is None else _of_part(names, part)
    if names is None or len(mine) == len(names):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="lilliput-view-") as made:
        wanted = set(mine.values())
        others = set(names.values()) - wanted
        for file in folder.iterdir():
            if file.is_file() and file.name != INDEX and file.name not in others:
                (Path(made) / file.name).symlink_to(file.resolve())
        content = {"metadata": {}, "weight_map": mine}
        (Path(made) / INDEX).write_text(json.dumps(content), encoding="utf-8")
        yield Path(made)
