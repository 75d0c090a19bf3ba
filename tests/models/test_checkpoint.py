"""A folder's weights: what is missing or damaged is named before anything is loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lilliput.errors import ModelError
from lilliput.models.checkpoint import INDEX, weight_files
from lilliput.models.sources import resolve
from lilliput.models.span import Span


@pytest.fixture
def folder(tiny_llama: Path, tmp_path: Path) -> Path:
    """The tiny model, one file a block."""
    tensors = load_file(tiny_llama / "model.safetensors")
    names = {n: f"model-{n.split('.')[2] if '.layers.' in n else 'ends'}.safetensors" for n in tensors}
    made = tmp_path / "sharded"
    made.mkdir()
    shutil.copy(tiny_llama / "config.json", made)
    for file in set(names.values()):
        save_file({n: t for n, t in tensors.items() if names[n] == file}, made / file, metadata={"format": "pt"})
    (made / INDEX).write_text(json.dumps({"weight_map": names}))
    return made


def test_a_folder_with_only_the_blocks_own_files_is_enough(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        if file.name != "model-2.safetensors":
            file.unlink()
    files = resolve(str(folder), weights=False)
    files.fetch((2, 3))
    Span.load(files, 2, 3, dtype=torch.float32)
    with pytest.raises(ModelError, match=r"lacks model-1\.safetensors, which its model.safetensors.index"):
        files.fetch((1, 3))


def truncated(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1000])


def cut_in_its_header(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:100])


def another_kind_of_file(file: Path) -> None:
    file.write_text("<html>Not found</html>")


def empty(file: Path) -> None:
    file.write_bytes(b"")


def garbled_header(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[8:12] = b"\xff\xff\xff\xff"
    file.write_bytes(content)


def wrong_shape_in_its_header(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b'"shape":[64,64]', b'"shape":[64,32]', 1))


def lacking_a_tensor(file: Path) -> None:
    tensors = load_file(file)
    tensors.pop("model.layers.2.mlp.up_proj.weight")
    save_file(tensors, file)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (truncated, r"it has [0-9,]+ bytes and should have [0-9,]+"),
        (cut_in_its_header, "it ends inside its header, after 100 bytes"),
        (another_kind_of_file, "does not begin as a safetensors file does"),
        (empty, "does not begin as a safetensors file does"),
        (garbled_header, "its header makes no sense"),
        (wrong_shape_in_its_header, "another shape than size"),
        (lacking_a_tensor, r"lacks the tensor model\.layers\.2\.mlp\.up_proj\.weight"),
    ],
)
def test_a_damaged_file_is_named(folder: Path, damage: Callable[[Path], None], says: str) -> None:
    damage(folder / "model-2.safetensors")
    with pytest.raises(ModelError, match=rf"model-2\.safetensors.*{says}.*Delete it and fetch"):
        resolve(str(folder), weights=False).fetch((1, 4))
    resolve(str(folder), weights=False).fetch((3, 6))  # who needs it not is not troubled


def test_a_tensor_of_another_shape_than_the_configuration_says(folder: Path) -> None:
    tensors = load_file(folder / "model-2.safetensors")
    tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(100, 64)
    save_file(tensors, folder / "model-2.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"(?s)layers\.2\.mlp\.up_proj\.weight"):
        Span.load(resolve(str(folder)), 1, 4, dtype=torch.float32)


def test_an_index_may_name_no_file_elsewhere(folder: Path) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {"model.layers.0.a": "../../etc/passwd"}}))
    with pytest.raises(ModelError, match="no file of this folder"):
        resolve(str(folder))


def test_names_that_are_not_understood_need_all_files(folder: Path) -> None:
    content = {"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}
    (folder / INDEX).write_text(json.dumps(content))
    assert weight_files(folder, (0, 1)) == ["1.safetensors", "2.safetensors"]
