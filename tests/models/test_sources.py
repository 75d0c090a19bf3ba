"""From names to files: what is accepted, what is refused, and what a person is told."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hivemind.moe.expert_uid import is_valid_prefix, is_valid_uid

from lilliput.errors import ModelError
from lilliput.models import checkpoint, sources
from lilliput.models.sources import fingerprint, resolve, uid_prefix

COMMIT = "0123456789" * 4


def test_importing_it_loads_no_heavy_library() -> None:
    code = "import sys, lilliput.models.sources; print({'torch', 'transformers', 'huggingface_hub'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"


def test_a_folder_is_a_model_named_after_it(tiny_llama: Path) -> None:
    files = resolve(str(tiny_llama))
    assert (files.name, files.path, files.uid_prefix) == ("tiny-llama", tiny_llama.resolve(), "tiny-llama")
    assert files.config()["num_hidden_layers"] == 6


def test_a_relative_folder_and_one_under_home_are_found(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny_llama.parent)
    monkeypatch.setenv("HOME", str(tiny_llama.parent))
    assert resolve("tiny-llama") == resolve("./tiny-llama") == resolve("~/tiny-llama") == resolve(str(tiny_llama))


def test_a_snapshot_in_the_hubs_cache_has_the_models_name(tiny_llama: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--an-org--Tiny-2.5" / "snapshots" / COMMIT
    shutil.copytree(tiny_llama, snapshot)
    assert resolve(str(snapshot)).name == "Tiny-2.5"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("./nowhere", "There is no folder ./nowhere"),
        ("/no/where", "There is no folder /no/where"),
        ("a/b/c", "There is no folder a/b/c"),
        ("./nowhere.gguf", r"There is no file \./nowhere\.gguf"),
        ("", "name is empty"),
    ],
)
def test_a_name_that_means_nothing_is_explained(name: str, says: str) -> None:
    with pytest.raises(ModelError, match=says) as error:
        resolve(name)
    assert "`smollm2`" in str(error.value)


def test_a_revision_of_what_is_not_the_hubs_is_refused(tiny_llama: Path) -> None:
    for name in ("smollm2", str(tiny_llama)):
        with pytest.raises(ModelError, match="has no revision main"):
            resolve(name, revision="main", weights=False)


def test_a_file_is_no_model(tiny_llama: Path) -> None:
    with pytest.raises(ModelError, match=r"is a file.*Give the folder"):
        resolve(str(tiny_llama / "config.json"))


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        resolve(str(tmp_path))


@pytest.mark.parametrize("content", ["{", "[]", "\x00\x01"])
def test_a_broken_config_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        resolve(str(tmp_path))


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02.")
    with pytest.raises(ModelError, match=r"only pickled weights.*safetensors"):
        resolve(str(tmp_path))


def test_a_folder_without_weights_is_refused_unless_none_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="holds no weights"):
        resolve(str(tmp_path))
    assert resolve(str(tmp_path), weights=False).path == tmp_path.resolve()


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (tmp_path / checkpoint.INDEX).write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(ModelError, match=r"lacks model-00001-of-00002\.safetensors, model-00002-of-00002"):
        resolve(str(tmp_path))


@pytest.mark.parametrize("name", ["SmolLM2-135M-Instruct", "Qwen2.5-7B", "a.b.c"])
def test_a_uid_prefix_makes_uids_that_hivemind_accepts(name: str) -> None:
    assert is_valid_uid(f"{uid_prefix(name)}.0")
    assert is_valid_uid(f"{uid_prefix(name)}.79")
    assert is_valid_prefix(f"{uid_prefix(name)}.")


def test_a_fingerprint_survives_saving_the_config_again(tiny_llama: Path, tmp_path: Path) -> None:
    from transformers import AutoConfig

    AutoConfig.from_pretrained(tiny_llama).save_pretrained(tmp_path)
    assert fingerprint(sources.read_config(tmp_path)) == resolve(str(tiny_llama)).fingerprint


def test_old_and_new_ways_to_write_a_config_have_one_fingerprint() -> None:
    old = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "rope_theta": 10000,
        "torch_dtype": "float16",
    }
    new = {**old, "head_dim": 16, "num_key_value_heads": 4, "dtype": "bfloat16"}
    new["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    del new["rope_theta"]
    assert fingerprint(old) == fingerprint(new)


@pytest.mark.parametrize(
    "change", [{"num_hidden_layers": 7}, {"rms_norm_eps": 1e-6}, {"rope_theta": 1e6}, {"num_key_value_heads": 1}]
)
def test_another_architecture_has_another_fingerprint(change: dict[str, object]) -> None:
    config = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 6}
    config |= {"rms_norm_eps": 1e-5, "rope_theta": 1e4}
    assert fingerprint({**config, **change}) != fingerprint(config)
