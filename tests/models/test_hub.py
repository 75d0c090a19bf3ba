"""What is fetched from a hub: the files of a part and no others, resumed, verified, and explained when it fails."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hub_server import COMMIT, Hub, point_hub_at, running_hub
from torch import nn

from lilliput.errors import ModelError
from lilliput.models import checkpoint
from lilliput.models.checkpoint import INDEX, weight_files
from lilliput.models.ends import load_ends
from lilliput.models.sources import resolve
from lilliput.models.span import Span

NAME = "org/Tiny-1.0"


@pytest.fixture(scope="module")
def repository(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in shards, with what nobody should fetch."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("hub") / "repository"
    AutoModelForCausalLM.from_pretrained(tiny_llama).save_pretrained(folder, max_shard_size="150KB")
    (folder / "modeling_evil.py").write_text("raise SystemExit")
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02.")
    assert len(weight_files(folder)) > 5
    return folder


@pytest.fixture
def hub(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with running_hub(tmp_path / "cache", monkeypatch) as hub:
        hub.repositories[NAME] = repository
        yield hub


def test_a_hub_id_is_fetched_once_without_code_and_pickles(hub: Hub) -> None:
    seen: list[tuple[str, int, int | None]] = []
    files = resolve(NAME, progress=lambda *report: seen.append(report))
    assert (files.name, files.uid_prefix, files.revision) == ("Tiny-1.0", "Tiny-1-0", COMMIT)
    assert {"config.json", INDEX, *weight_files(files.path)} <= hub.files_asked
    assert not any(file.endswith((".py", ".bin")) for file in hub.files_asked)
    for file in weight_files(files.path):
        size = (files.path / file).stat().st_size
        reports = [(done, total) for stage, done, total in seen if f"downloading {NAME}, {file}" in stage]
        assert reports[0] == (0, size)
        assert reports[-1] in ((size, size), (0, size))  # the latter: huggingface_hub < 1

    hub.asked.clear()
    assert resolve(NAME) == files
    assert hub.asked == []


@pytest.mark.parametrize("part", [(2, 4), (5, 6), "ends"])
def test_a_part_needs_only_the_files_with_its_tensors(hub: Hub, part: checkpoint.Part) -> None:
    files = resolve(NAME, weights=False)
    assert INDEX in hub.files_asked
    assert not any(file.endswith(".safetensors") for file in hub.files_asked)
    hub.asked.clear()
    files.fetch(part)
    expected = set(weight_files(files.path, part))
    assert hub.files_asked == expected
    assert expected < set(weight_files(files.path))
    if part == "ends":
        load_ends(files, nn.Identity(), dtype=torch.float32)
    else:
        Span.load(files, *part, dtype=torch.float32)
    with pytest.raises(ModelError, match="lacks model-0000"):
        resolve(str(files.path))  # the others are not here, and a folder does not know where from


def test_a_part_computes_what_the_whole_does(hub: Hub, tiny_llama: Path) -> None:
    files = resolve(NAME, weights=False)
    files.fetch((1, 3))
    hidden = torch.randn(1, 5, 64)
    part, whole = (Span.load(f, 1, 3, dtype=torch.float32) for f in (files, resolve(str(tiny_llama))))
    assert torch.equal(part.dense(hidden, 1, 3), whole.dense(hidden, 1, 3))


def test_the_facts_come_from_headers(hub: Hub, tiny_llama: Path) -> None:
    files = resolve(NAME, weights=False)
    hub.asked.clear()
    facts = files.facts()
    assert facts.blocks == resolve(str(tiny_llama)).facts().blocks
    shards = {name: (files.origin, begin, end) for name, (begin, end) in hub.asked}  # one request each
    assert len(shards) == len(hub.asked) == len(weight_files(files.path))
    assert all(begin == 0 and end <= 100_001 for _, (begin, end) in hub.asked)
    assert not list(files.path.glob("*.safetensors"))


@pytest.mark.parametrize("xet", [False, True])
def test_an_interrupted_download_goes_on_where_it_was(hub: Hub, monkeypatch: pytest.MonkeyPatch, xet: bool) -> None:
    from huggingface_hub import constants

    hub.xet = xet
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", xet)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10_000)  # what arrives is kept in pieces of this size
    files = resolve(NAME, weights=False)
    shard = weight_files(files.path, (2, 3))[0]
    size = (hub.repositories[NAME] / shard).stat().st_size
    hub.cut[shard] = 40_000
    hub.unreachable_after = 2  # of its requests, then nobody answers
    with pytest.raises(ModelError, match=r"could not be fetched.*goes on from there"):
        files.fetch((2, 3))
    hub.cut, hub.unreachable_after = {}, None
    files.fetch((2, 3))
    ranges = [asked for name, asked in hub.asked if name == shard]
    # older releases of the client do not go on by themselves when a connection breaks
    assert ranges in ([(0, size), (40_000, size), (80_000, size)], [(0, size), (40_000, size)])
    assert (files.path / shard).read_bytes() == (hub.repositories[NAME] / shard).read_bytes()


def test_what_arrives_damaged_is_named_and_thrown_away(hub: Hub) -> None:
    files = resolve(NAME, weights=False)
    shard = weight_files(files.path, (2, 3))[-1]
    hub.spoilt.add(shard)
    with pytest.raises(ModelError, match=rf"{shard} of {NAME} arrived damaged.*try again"):
        files.fetch((2, 3))
    hub.spoilt.clear()
    files.fetch((2, 3))
    assert (files.path / shard).read_bytes() == (hub.repositories[NAME] / shard).read_bytes()


def test_a_file_that_was_damaged_later_is_fetched_again_at_the_next_try(hub: Hub) -> None:
    files = resolve(NAME, weights=False)
    files.fetch((2, 3))
    shard = weight_files(files.path, (2, 3))[0]
    blob = (files.path / shard).resolve()
    blob.write_bytes(blob.read_bytes()[:-100])
    with pytest.raises(ModelError, match=rf"{shard} is damaged: it has .* bytes and should have .*thrown away"):
        files.fetch((2, 3))
    files.fetch((2, 3))
    assert (files.path / shard).read_bytes() == (hub.repositories[NAME] / shard).read_bytes()


def test_blocks_that_the_model_lacks_fetch_nothing(hub: Hub) -> None:
    files = resolve(NAME, weights=False)
    hub.asked.clear()
    with pytest.raises(ModelError, match=r"has blocks 0:6; 4:7 is no part"):
        files.fetch((4, 7))
    assert hub.asked == []


def test_a_private_model_needs_its_token(hub: Hub) -> None:
    hub.token = "hf_secret"
    with pytest.raises(ModelError, match=r"private.*HF_TOKEN"):
        resolve(NAME, weights=False)
    files = resolve(NAME, weights=False, token="hf_secret")
    assert files.facts().hidden_size == 64
    files.fetch((0, 1))
    assert "hf_secret" not in repr(files)


def test_a_revision_is_fetched_by_name_and_a_wrong_one_explained(hub: Hub) -> None:
    assert resolve(NAME, weights=False, revision=COMMIT).revision == COMMIT
    with pytest.raises(ModelError, match=r"has no revision elsewhere"):
        resolve(NAME, revision="elsewhere")


def test_a_fetched_model_is_found_when_the_hub_cannot_be_reached(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    files = resolve(NAME)
    point_hub_at(9, monkeypatch)
    assert resolve(NAME).path == files.path
    with pytest.raises(ModelError, match=r"not on this machine, and the hub cannot be reached"):
        resolve("org/Other")


def test_a_model_that_the_hub_does_not_know_is_explained(hub: Hub) -> None:
    with pytest.raises(ModelError, match=r"The hub knows no model org/Nothing"):
        resolve("org/Nothing")


def test_a_repository_with_only_pickles_is_refused(hub: Hub, tmp_path: Path) -> None:
    pickles = tmp_path / "pickles"
    pickles.mkdir()
    (pickles / "config.json").write_text((hub.repositories[NAME] / "config.json").read_text())
    (pickles / "pytorch_model.bin").write_bytes(b"\x80\x02.")
    hub.repositories["org/Pickles"] = pickles
    with pytest.raises(ModelError, match=r"only pickled weights on the hub.*safetensors"):
        resolve("org/Pickles")
    with pytest.raises(ModelError, match=r"only pickled weights on the hub"):
        resolve("org/Pickles", weights=False).facts()
