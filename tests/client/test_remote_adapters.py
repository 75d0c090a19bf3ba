"""A swarm whose servers have adapters: answers equal PEFT's, also when servers die; who has none is passed over."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_folders import save_adapter, with_adapter
from transformers import LogitsProcessor, LogitsProcessorList

from lilliput import AutoDistributedModelForCausalLM
from lilliput.cli.local_swarm import LocalSwarm
from lilliput.cli.nursery import Nursery
from lilliput.client.connection import Patience
from lilliput.client.server_session import ServerSession
from lilliput.errors import BY_CODE, LilliputError, MissingAdapter, MissingBlocks

GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "max_new_tokens": 12}
PROMPT = torch.arange(5, 45)[None]
SPANS = [(0, 2), (2, 4), (4, 6)]


@pytest.fixture(scope="module")
def folders(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("adapters")
    targets = {"one": ["q_proj", "k_proj", "v_proj", "up_proj"], "two": ["o_proj", "down_proj"]}
    return {
        name: save_adapter(tiny_llama, base / name, seed=seed, r=4, lora_alpha=8, target_modules=modules)
        for seed, (name, modules) in enumerate(targets.items())
    }


@pytest.fixture(scope="module")
def options(folders: dict[str, Path]) -> list[str]:
    return [word for name, folder in folders.items() for word in ("--adapter", f"{name}={folder}")]


@pytest.fixture(scope="module")
def adapted_swarm(tiny_llama: Path, options: list[str], nursery: Nursery) -> Iterator[LocalSwarm]:
    """Three servers with both adapters, and one with all blocks, which would be the shortest way, and none."""
    with LocalSwarm(str(tiny_llama), [(0, 6)], options=["--dtype", "float32"], nursery=nursery) as swarm:
        swarm.start(SPANS, options)
        yield swarm


def connected(swarm: LocalSwarm, model: Path, adapter: str, **options: Any) -> Any:
    return AutoDistributedModelForCausalLM.from_pretrained(
        str(model), initial_peers=swarm.initial_peers, dtype="float32", adapter=adapter, **options
    )


@pytest.fixture(scope="module")
def models(adapted_swarm: LocalSwarm, tiny_llama: Path) -> Iterator[dict[str, Any]]:
    """The distributed model with each adapter, and without."""
    models = {name: connected(adapted_swarm, tiny_llama, name) for name in ("", "one", "two")}
    yield models
    for model in models.values():
        model.close()


@pytest.fixture(scope="module")
def expected(tiny_llama: Path, folders: dict[str, Path], whole: Any) -> dict[str, Any]:
    return {"": whole, **{name: with_adapter(tiny_llama, folder) for name, folder in folders.items()}}


class Kill(LogitsProcessor):
    """Kills a server before the sixth token is chosen."""

    def __init__(self, pid: int) -> None:
        self._pid, self._calls = pid, 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._calls += 1
        if self._calls == 6:
            os.kill(self._pid, signal.SIGKILL)
        return scores


def test_all_at_the_same_time(models: dict[str, Any], expected: dict[str, Any]) -> None:
    wanted = {name: model.generate(PROMPT, **GREEDY).tolist() for name, model in expected.items()}
    assert len({str(answer) for answer in wanted.values()}) == 3
    got: dict[str, Any] = {}

    def ask(name: str) -> None:
        got[name] = [models[name].generate(PROMPT, **GREEDY).tolist() for _ in range(3)]

    threads = [threading.Thread(target=ask, args=[name]) for name in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # three times each: what the servers' caches hold of this very prompt is another one for each adapter
    assert got == {name: [answer] * 3 for name, answer in wanted.items()}


def test_the_way_leads_only_over_servers_that_have_it(adapted_swarm: LocalSwarm, models: dict[str, Any]) -> None:
    without, *adapted = [server.peer_id for server in adapted_swarm.servers]

    def chain(adapter: str, banned: list[str]) -> list[str]:
        remote = models[adapter].remote
        return [hop.peer_id for hop in remote._shared.run(remote.remote_model.chain(0, 6, banned=banned))]

    assert chain("", adapted) == [without]
    assert chain("one", []) == chain("one", [without]) == adapted
    with pytest.raises(MissingAdapter, match=r"holds blocks 2:4 .* has the adapter 'one'"):
        chain("one", adapted[1:2])


def test_gradients(models: dict[str, Any], expected: dict[str, Any]) -> None:
    inputs = torch.randn(2, 15, 64, generator=torch.Generator().manual_seed(0))

    def gradient(model: Any) -> torch.Tensor:
        tried = inputs.clone().requires_grad_()
        model(inputs_embeds=tried, use_cache=False).logits.square().sum().backward()
        assert tried.grad is not None
        return tried.grad

    for name, model in models.items():
        got, wanted = gradient(model), gradient(expected[name])
        assert (got - wanted).abs().max() < 1e-4 * wanted.abs().max()


def test_one_that_nobody_has(adapted_swarm: LocalSwarm, tiny_llama: Path, models: dict[str, Any]) -> None:
    with pytest.raises(MissingAdapter, match=r"holds blocks 0:6 .* has the adapter 'three'") as raised:
        connected(adapted_swarm, tiny_llama, "three")
    assert raised.value.blocks == ((0, 6),)
    assert isinstance(raised.value, MissingBlocks)  # waited for and recovered from as those are


def test_a_server_without_it_says_so(models: dict[str, Any], adapted_swarm: LocalSwarm) -> None:
    """Also to a client that does not look at records."""
    remote = models["one"].remote.remote_model

    async def open_without() -> None:
        adapted = [server.peer_id for server in adapted_swarm.servers[1:]]
        (hop,) = await models[""].remote.remote_model.chain(0, 6, banned=adapted)
        await ServerSession.open(remote, hop, max_length=32, rows=1)

    with pytest.raises(MissingAdapter, match=r"\(0:6\): this server has no adapter 'one'; it has none") as raised:
        models["one"].remote._shared.run(open_without())
    assert BY_CODE["NO_ADAPTER"] is type(raised.value)
    assert raised.value.retry_elsewhere


def test_a_damaged_one_ends_the_start(tiny_llama: Path, tmp_path: Path, nursery: Nursery) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 8}')
    (tmp_path / "adapter_model.safetensors").write_bytes(b"\x10")
    options = ["--adapter", f"broken={tmp_path}"]
    with (
        pytest.raises(LilliputError, match=r"the adapter broken: .*adapter_model\.safetensors is damaged"),
        LocalSwarm(str(tiny_llama), [(0, 1)], options=options, nursery=nursery),
    ):
        pass


def test_a_server_dies_and_one_with_the_adapter_takes_over(
    adapted_swarm: LocalSwarm, tiny_llama: Path, options: list[str], expected: dict[str, Any]
) -> None:
    """Not the one that has all blocks and no adapter. The last test: it leaves the swarm changed."""
    swarm = adapted_swarm
    model = connected(swarm, tiny_llama, "two", patience=Patience(silence=1.0))
    try:
        with model.inference_session(max_length=64) as session:
            first = model.generate(PROMPT, **{**GREEDY, "max_new_tokens": 1})
            (successor,) = swarm.start([(2, 4)], options)
            by_peer = {server.peer_id: server for server in swarm.servers}
            victim = by_peer[session.hops[1].peer_id]
            answer = model.generate(
                first, logits_processor=LogitsProcessorList([Kill(victim.pid)]), **{**GREEDY, "max_new_tokens": 11}
            )
            assert answer.tolist() == expected["two"].generate(PROMPT, **GREEDY).tolist()
            recoveries = session.core.recoveries
            assert [(r.peer_id, r.new_peer_ids) for r in recoveries] == [(victim.peer_id, (successor.peer_id,))]
    finally:
        model.close()
