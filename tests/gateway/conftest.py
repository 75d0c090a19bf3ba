"""Real `lilliput api` processes before a swarm with the demo's real model."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from browsers import CHROMIUM
from gateways import KEYS, LIMITED, ORIGIN, Gateway

from lilliput.cli import process
from lilliput.cli.local_swarm import LocalSwarm
from lilliput.cli.nursery import Nursery
from lilliput.models.sources import DEMO, ModelFiles

process.share_cores()  # torch is not loaded yet

#: as templates with tools are, and those of models that reason, in short
TOOL_TEMPLATE = (
    "{% if tools %}<|im_start|>system\nCall one of these with <tool_call>{...}</tool_call>:\n"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% if reasoning_effort == 'high' %}<|im_start|>system\nThink hard.<|im_end|>\n{% endif %}"
    "{% if enable_thinking is false %}<|im_start|>system\nAnswer at once.<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random LoRA adapter of the demo's model."""
    import torch
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("adapter")
    generator = torch.Generator().manual_seed(0)
    layer = "base_model.model.model.layers.{}.mlp.down_proj.lora_{}.weight"
    shapes = {"A": (2, 1536), "B": (576, 2)}
    save_file(
        {layer.format(n, half): torch.randn(shapes[half], generator=generator) / 4 for n in range(30) for half in "AB"},
        folder / "adapter_model.safetensors",
    )
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["down_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def swarm(demo_model: ModelFiles, adapter: Path) -> Iterator[LocalSwarm]:
    """Two servers with all blocks, exact enough to compare with. Their caches hold one very long session, not two."""
    with Nursery() as nursery:
        options = [
            "--dtype",
            "float32",
            "--cache-tokens",
            "12288",
            "--adapter",
            f"noise={adapter}",
            "--metrics-port",
            "0",
            "--log-json",
        ]
        with LocalSwarm("smollm2", [(0, 15), (15, 30)], options=options, nursery=nursery) as swarm:
            yield swarm


@pytest.fixture(scope="session")
def start(swarm: LocalSwarm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Gateway]]:
    """Starts a gateway with more options."""
    with contextlib.ExitStack() as ending:

        def start(model: str, *options: str) -> Gateway:
            command = [sys.executable, "-m", "lilliput.cli", "api", model, "--port", "0", "--json", "--log-json"]
            log = tmp_path_factory.mktemp("api") / "log"
            environment = {**os.environ, "LILLIPUT_PEERS": swarm.initial_peers[0], "HF_HUB_OFFLINE": "1"}
            with log.open("wb") as errors:
                process = ending.enter_context(
                    subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=errors, env=environment)
                )
            ending.callback(process.terminate)
            assert process.stdout is not None
            facts = json.loads(process.stdout.readline())
            return Gateway(facts["url"], facts["model"], process, log)

        yield start


@pytest.fixture(scope="session")
def gateway(start: Callable[..., Gateway]) -> Gateway:
    """One that everyone may use."""
    return start("smollm2", "--dtype", "float32")


@pytest.fixture(scope="session")
def guarded(start: Callable[..., Gateway], demo_model: ModelFiles, tmp_path_factory: pytest.TempPathFactory) -> Gateway:
    """One with keys, that answers one request at a time and lets one wait. Its chat template knows tools."""
    folder = tmp_path_factory.mktemp("models") / DEMO
    folder.mkdir()
    for file in Path(demo_model.path).iterdir():
        (folder / file.name).symlink_to(file)
    settings = folder / "tokenizer_config.json"
    content = json.loads(settings.read_text()) | {"chat_template": TOOL_TEMPLATE}
    settings.unlink()
    settings.write_text(json.dumps(content))
    keys = [part for key in KEYS for part in ("--api-key", key)]
    file = folder.with_name("keys")
    file.write_text("".join(f"{name} {key} {limits}\n" for name, (key, limits) in LIMITED.items()))
    file.chmod(0o600)
    limits = ["--max-requests", "1", "--max-waiting", "1"]
    return start(str(folder), *keys, "--api-keys", str(file), "--allow-origin", ORIGIN, *limits)


@pytest.fixture(scope="session")
def client(gateway: Gateway) -> openai.OpenAI:
    return gateway.client()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("no browser here")
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-background-networking"])
        yield browser
        browser.close()
