"""`lilliput generate`: the new text on standard output, and errors in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from terminal import Family, invoke, run
from transformers import AutoModelForCausalLM, AutoTokenizer

from lilliput.cli.local_swarm import LocalSwarm
from lilliput.cli.output import Output
from lilliput.errors import LilliputError
from lilliput.models.sources import ModelFiles

TEXT = "The three primary colours are"
GREEDY = ("--temperature", "0", "--max-new-tokens", "12", "--dtype", "float32")


@pytest.fixture(scope="module")
def expected(demo_model: ModelFiles) -> dict[int, str]:
    """What transformers makes of TEXT in one process, by the number of beams."""
    tokenizer = AutoTokenizer.from_pretrained(demo_model.path)
    model = AutoModelForCausalLM.from_pretrained(demo_model.path, dtype=torch.float32)
    inputs = tokenizer(TEXT, return_tensors="pt")

    def text(beams: int) -> str:
        ids = model.generate(**inputs, do_sample=False, num_beams=beams, max_new_tokens=12)
        return tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    return {beams: text(beams) for beams in (1, 3)}


def test_it_says_what_transformers_says(peers: list[str], expected: dict[int, str]) -> None:
    shown = run("generate", "smollm2", *peers, *GREEDY, stdin=TEXT + "\n")
    assert (shown.returncode, shown.stdout) == (0, expected[1].rstrip("\n") + "\n")
    assert "tokens/s" not in shown.stderr


def test_as_json(peers: list[str], expected: dict[int, str]) -> None:
    shown = invoke("generate", "smollm2", *peers, *GREEDY, "--json", "--audit", "1", "--prompt", TEXT)
    facts = json.loads(shown.stdout)
    assert facts["text"] == expected[1]
    assert (len(facts["tokens"]), facts["recoveries"]) == (12, [])
    assert facts["audits"] == {"agreed": 0, "convicted": [], "unable": 36}  # nobody else holds the blocks


def test_beams(peers: list[str], expected: dict[int, str]) -> None:
    shown = invoke("generate", "smollm2", *peers, *GREEDY, "--num-beams", "3", "--prompt", TEXT)
    assert (shown.exit_code, shown.stdout.rstrip("\n")) == (0, expected[3].rstrip("\n"))


def test_a_question_is_answered_and_who_asks_for_more_hears_the_pace(peers: list[str]) -> None:
    shown = invoke("generate", "smollm2", *peers, *GREEDY, "-v", "--chat", "-p", "What is the capital of France?")
    assert (shown.exit_code, shown.stdout) == (0, "The capital of France is Paris.\n")
    assert "8 tokens" in shown.stderr
    assert "tokens/s" in shown.stderr


def test_a_seed_makes_chance_repeatable(peers: list[str]) -> None:
    def said(seed: str) -> str:
        options = ("--temperature", "1.5", "--max-new-tokens", "6", "--seed", seed)
        return invoke("generate", "smollm2", *peers, *options, "-p", TEXT).stdout

    assert said("1") == said("1") != said("2")


def test_who_reads_it_may_leave(peers: list[str]) -> None:
    command = [sys.executable, "-m", "lilliput.cli", "generate", "smollm2", *peers, "--prompt", "Once upon a time"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=Family().environment)
    assert process.stdout is not None
    assert process.stdout.read(1)
    process.stdout.close()
    assert process.stderr is not None
    said = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait(60) == 1
    assert "Traceback" not in said
    assert "Broken" not in said


def test_a_full_disk_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        output = Output()
        with pytest.raises(LilliputError, match=r"cannot be written to standard output: No space left on device\.$"):
            output.write("something")
        output.write("goes nowhere")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "Name a member of the swarm with --initial-peers"),
        (
            ("--initial-peers", "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWJMpHSTaqq6g2As7rzbyqD5o2h6RuiPh8or9CU5KqYavd"),
            "none of the initial peers answers (/ip4/127.0.0.1/tcp/1/p2p/12D3KooWJM",
        ),
    ],
)
def test_addresses_that_lead_nowhere(arguments: tuple[str, ...], complaint: str) -> None:
    shown = invoke("generate", "smollm2", *arguments, "--prompt", TEXT)
    assert (shown.exit_code, shown.stdout) == (1, "")
    assert shown.stderr.splitlines()[-1].startswith(complaint)


def test_a_model_that_is_not_there(peers: list[str]) -> None:
    shown = invoke("generate", "./nowhere", *peers, "--prompt", TEXT)
    assert (shown.exit_code, shown.stdout) == (1, "")
    assert shown.stderr.splitlines()[-1].startswith("There is no folder ./nowhere.")


def test_a_model_that_nobody_serves(peers: list[str], tiny_llama: Path) -> None:
    shown = invoke("generate", str(tiny_llama), *peers, "--prompt", TEXT)
    assert (shown.exit_code, shown.stdout) == (1, "")
    assert "no server holds blocks 0:6 of tiny-llama" in shown.stderr.splitlines()[-1]


def test_missing_blocks_are_named(part: LocalSwarm) -> None:
    shown = invoke("generate", "smollm2", "--initial-peers", part.initial_peers[0], "--prompt", TEXT)
    assert (shown.exit_code, shown.stdout) == (1, "")
    assert "no server holds blocks 10:30 of SmolLM2-135M-Instruct" in shown.stderr.splitlines()[-1]


def test_a_text_that_is_too_long(peers: list[str]) -> None:
    shown = invoke("generate", "smollm2", *peers, stdin="la " * 9000)
    assert (shown.exit_code, shown.stdout) == (1, "")
    assert "and its servers take 8192" in shown.stderr.splitlines()[-1]


def test_no_text() -> None:
    shown = invoke("generate", "smollm2", stdin="\n")
    assert (shown.exit_code, shown.stderr) == (1, "There is no text: give it with --prompt, or on standard input.\n")
