"""BLOOM with real server processes says what one process says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from families import FAMILIES
from test_families import SPANS, random_ids, save_random
from transformers import AutoModelForCausalLM

from lilliput import AutoDistributedModelForCausalLM
from lilliput.cli.local_swarm import LocalSwarm


def test_greedy_beams_and_unequal_prompts(tmp_path: Path) -> None:
    folder = tmp_path / "tiny-bloom"
    save_random(next(family for family in FAMILIES if family.name == "bloom"), folder)
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    ids = random_ids(2, 20)
    mask = torch.ones_like(ids)
    mask[0, :7] = ids[0, :7] = 0
    ways: list[dict[str, Any]] = [
        {},
        {"num_beams": 3},
        {"attention_mask": mask},
        {"attention_mask": mask, "num_beams": 2},
    ]
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with LocalSwarm(str(folder), SPANS, options=["--dtype", "float32"]) as swarm:
        model = AutoDistributedModelForCausalLM.from_pretrained(
            str(folder), initial_peers=swarm.initial_peers, dtype="float32"
        )
        try:
            for way in ways:
                given = {"attention_mask": torch.ones_like(ids), **way, **options}
                assert model.generate(ids, **given).tolist() == whole.generate(ids, **given).tolist()
        finally:
            model.close()
        command = [sys.executable, "-m", "lilliput.cli", "route", str(folder), "--json", "--initial-peers"]
        shown = subprocess.run([*command, swarm.initial_peers[0]], capture_output=True, text=True, timeout=120)
        assert shown.returncode == 0, shown.stderr  # its configuration has names of its own for sizes
        assert [leg["end"] for leg in json.loads(shown.stdout)["legs"]] == [end for _, end in SPANS]
