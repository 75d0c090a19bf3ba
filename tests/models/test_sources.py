"""From names to files: what is accepted, what is refused, and what a person is told."""

from __future__ import annotations

import hashlib
import http.server
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from hivemind.moe.expert_uid import is_valid_prefix, is_valid_uid

from lilliput.errors import ModelError
from lilliput.models import sources
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
        ("", "name is empty"),
    ],
)
def test_a_name_that_means_nothing_is_explained(name: str, says: str) -> None:
    with pytest.raises(ModelError, match=says) as error:
        resolve(name)
    assert "`smollm2`" in str(error.value)


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
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (tmp_path / sources.INDEX).write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(ModelError, match=r"lacks model-00002-of-00002\.safetensors"):
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


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of a hub as a download needs. `repositories` maps a name to a folder; `asked` lists the files served."""

    repositories: ClassVar[dict[str, Path]] = {}
    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        for name, folder in self.repositories.items():
            files = sorted(file for file in folder.iterdir() if file.is_file())
            if self.path.startswith(f"/api/models/{name}/tree/"):
                tree = [{"type": "file", "path": f.name, "size": f.stat().st_size, "oid": _digest(f)} for f in files]
                return self._json(tree)
            if self.path.startswith(f"/api/models/{name}"):
                return self._json({"id": name, "sha": COMMIT, "siblings": [{"rfilename": f.name} for f in files]})
            if self.path.startswith(f"/{name}/resolve/") and (file := folder / self.path.rpartition("/")[2]).is_file():
                if self.command == "GET":
                    self.asked.append(file.name)
                return self._send(file.read_bytes(), {"ETag": f'"{_digest(file)}"'})
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def _json(self, content: object) -> None:
        self._send(json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _send(self, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(200)
        for key, value in {**headers, "X-Repo-Commit": COMMIT, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


def _digest(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


def _point_hub_at(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What HF_ENDPOINT does before huggingface_hub is imported."""
    from huggingface_hub import constants, file_download

    url = f"http://127.0.0.1:{port}"
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, url)
    for module in constants, file_download:  # before 1.0 the second had a copy
        monkeypatch.setattr(module, "HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)
    monkeypatch.setattr(constants, "ENDPOINT", url)


@pytest.fixture
def hub(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    """A hub on loopback with `org/Tiny-1.0` in shards, and an empty cache of this machine's."""
    import huggingface_hub.constants
    from transformers import AutoModelForCausalLM

    repository = tmp_path / "repository"
    AutoModelForCausalLM.from_pretrained(tiny_llama).save_pretrained(repository, max_shard_size="300KB")
    (repository / "modeling_evil.py").write_text("raise SystemExit")
    (repository / "pytorch_model.bin").write_bytes(b"\x80\x02.")
    Hub.repositories, Hub.asked = {"org/Tiny-1.0": repository}, []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    _point_hub_at(server.server_port, monkeypatch)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield Hub
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_hub_id_is_fetched_once_without_code_and_pickles(hub: type[Hub]) -> None:
    seen: list[tuple[str, int, int | None]] = []
    files = resolve("org/Tiny-1.0", progress=lambda *report: seen.append(report))
    assert (files.name, files.uid_prefix, files.revision) == ("Tiny-1.0", "Tiny-1-0", COMMIT)
    assert len(sources.weight_files(files.path)) > 1
    assert {"config.json", sources.INDEX, *sources.weight_files(files.path)} <= set(hub.asked)
    assert not any(file.endswith((".py", ".bin")) for file in hub.asked)
    weight_bytes = sum((files.path / file).stat().st_size for file in sources.weight_files(files.path))
    assert max(done for stage, done, _ in seen if "downloading" in stage) in (weight_bytes, 0)  # 0: huggingface_hub < 1

    hub.asked.clear()
    assert resolve("org/Tiny-1.0") == files
    assert hub.asked == []


def test_without_weights_only_the_small_files_are_fetched(hub: type[Hub]) -> None:
    files = resolve("org/Tiny-1.0", weights=False)
    assert files.config()["num_hidden_layers"] == 6
    assert not any(file.endswith(".safetensors") for file in hub.asked)


def test_a_fetched_model_is_found_when_the_hub_cannot_be_reached(
    hub: type[Hub], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = resolve("org/Tiny-1.0")
    _point_hub_at(9, monkeypatch)
    assert resolve("org/Tiny-1.0").path == files.path
    with pytest.raises(ModelError, match=r"not on this machine, and the hub cannot be reached"):
        resolve("org/Other")


def test_a_model_that_the_hub_does_not_know_is_explained(hub: type[Hub]) -> None:
    with pytest.raises(ModelError, match=r"The hub knows no model org/Nothing"):
        resolve("org/Nothing")


def test_a_repository_with_only_pickles_is_refused(hub: type[Hub]) -> None:
    for file in hub.repositories["org/Tiny-1.0"].glob("*.safetensors*"):
        file.unlink()
    with pytest.raises(ModelError, match=r"only pickled weights on the hub"):
        resolve("org/Tiny-1.0")
