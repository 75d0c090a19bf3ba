"""Servers send outputs straight to the next server: fewer messages, the same tokens, whatever happens to them."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList

from lilliput import AutoDistributedModelForCausalLM, Server
from lilliput.cli.local_swarm import LocalSwarm
from lilliput.client.connection import Patience
from lilliput.client.peer_stream import PeerStream
from lilliput.client.server_session import ServerSession
from lilliput.wire.protocol import PUSH

NEW = 12
GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
PROMPT = torch.arange(5, 45)[None]
SPANS = [(0, 2), (2, 4), (4, 6)]


@contextmanager
def connected(folder: Path, peers: Any, **options: Any) -> Iterator[Any]:
    options = {"patience": Patience(silence=1.0), **options}
    model = AutoDistributedModelForCausalLM.from_pretrained(
        str(folder), initial_peers=list(peers), dtype="float32", **options
    )
    try:
        yield model
    finally:
        model.close()


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Steps that clients send, and outputs that come back to them."""
    counts: Counter[str] = Counter()
    post, take = PeerStream.post, ServerSession.take

    def counting_post(self: PeerStream, number: int, message: Any, *args: Any, **options: Any) -> None:
        counts[str(message.WhichOneof("body"))] += 1
        post(self, number, message, *args, **options)

    def counting_take(self: ServerSession, received: Any) -> None:
        counts[received.kind] += 1
        take(self, received)

    monkeypatch.setattr(PeerStream, "post", counting_post)
    monkeypatch.setattr(ServerSession, "take", counting_take)
    return counts


class Each(LogitsProcessor):
    """Does something before each token."""

    def __init__(self, action: Callable[[int], None]) -> None:
        self.action, self.calls = action, 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.action(self.calls)
        return scores


def generate(
    model: Any, action: Callable[[int], None] | None = None, ids: torch.Tensor = PROMPT, **options: Any
) -> Any:
    processors = LogitsProcessorList([Each(action)]) if action else None
    options = {**GREEDY, "max_new_tokens": NEW, **options}
    return model.generate(ids, logits_processor=processors, **options).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(("push", "messages"), [(True, 1), (False, 3)])
def test_messages_for_each_token(
    push: bool, messages: int, tiny_swarm: LocalSwarm, tiny_llama: Path, whole: Any, counted: Counter[str]
) -> None:
    with (
        connected(tiny_llama, tiny_swarm.initial_peers, push=push, prefix_secret=f"{push}") as model,  # nothing cached
        model.inference_session(max_length=64) as session,
    ):
        assert generate(model) == generate(whole)
        assert (counted["step"], counted["output"]) == (messages * NEW, messages * NEW)
        for stats in session.stats:
            assert (stats.steps, stats.computed_tokens) == (NEW, PROMPT.shape[1] + NEW - 1)
            assert stats.compute_ms > 0
        assert [stats.bytes_sent > 0 for stats in session.stats] == [True, not push, not push]


def test_whatever_is_pushed_equals_the_whole_model(
    tiny: Any, tiny_llama: Path, whole: Any, counted: Counter[str]
) -> None:
    batch = torch.randint(5, 250, (3, 20), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(batch)
    for row, padding in enumerate((0, 7, 3)):
        batch[row, :padding], mask[row, :padding] = 0, 0
    assistant = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    with torch.no_grad():  # wrong now and then, so that something is rolled back
        assistant.lm_head.weight += 0.05 * torch.randn(assistant.lm_head.weight.shape)
    long = torch.randint(5, 250, (1, 1700), generator=torch.Generator().manual_seed(1))
    for options in (
        {"num_beams": 4},
        {"ids": batch, "attention_mask": mask},
        {"ids": batch, "attention_mask": mask, "num_beams": 3},
        {"assistant_model": assistant},
        {"ids": long},
    ):
        expected = generate(whole, **{name: value for name, value in options.items() if name != "assistant_model"})
        assert generate(tiny, **options) == expected
    assert counted["step"] == counted["output"]
    assert not counted["error"]


def test_deep_prompts_are_carried(tiny: Any, counted: Counter[str]) -> None:
    """They are others for every server."""
    hidden, prompts = torch.randn(1, 5, 64), torch.randn(6, 1, 5, 64)
    with tiny.inference_session(max_length=16) as session:
        session.step(hidden, prompts=prompts)
        assert counted["output"] == 3
        session.step(hidden)
        assert counted["output"] == 4


def test_sessions_side_by_side(tiny: Any, whole: Any) -> None:
    hidden = [torch.randn(1, 12, 64, generator=torch.Generator().manual_seed(seed)) for seed in range(8)]
    kept: list[torch.Tensor] = []
    handle = whole.model.norm.register_forward_pre_hook(lambda module, args: kept.append(args[0]))
    with torch.no_grad():
        for states in hidden:
            whole.model(inputs_embeds=states)
    handle.remove()
    outputs: dict[int, torch.Tensor] = {}

    def talk(index: int) -> None:
        with tiny.inference_session(max_length=32) as session:
            outputs[index] = torch.cat([session.step(part) for part in hidden[index].split(3, dim=1)], dim=1)

    threads = [threading.Thread(target=talk, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, expected in enumerate(kept):
        assert float((outputs[index] - expected).abs().max() / expected.abs().max()) < 1e-4


@contextmanager
def here(folder: Path) -> Iterator[list[Server]]:
    """Servers in this process; when they are left, no page of any session is in use."""
    servers: list[Server] = []
    try:
        for span in SPANS:
            peers = servers[0].addresses if servers else ()
            servers.append(Server(str(folder), span, initial_peers=peers, dtype="float32", cache_tokens=4096))
            servers[-1].run_in_background()
        yield servers
        until = time.monotonic() + 20
        for server in servers:
            service: Any = server.service
            while service.engine.call(lambda e=service.engine: e.pool.used).result(10) or service.pushed_sessions:
                assert time.monotonic() < until
                time.sleep(0.02)
    finally:
        for server in servers:
            server.shutdown()


def test_where_servers_cannot_reach_one_another_the_client_carries(
    tiny_llama: Path, whole: Any, counted: Counter[str]
) -> None:
    """Between these two, and only there."""
    with here(tiny_llama) as servers:
        deaf: Any = servers[1]  # it takes sessions, but nobody's pushes
        deaf._loop.call_soon_threadsafe(
            lambda: deaf._loop.create_task(deaf.service.pushes._node.p2p.remove_binary_stream_handler(PUSH))
        )
        with connected(tiny_llama, servers[0].addresses) as model:
            with model.inference_session(max_length=64):
                assert generate(model) == generate(whole)
                assert (counted["step"], counted["output"]) == (2 * NEW, 2 * NEW)
            with model.inference_session(max_length=64) as session:
                assert generate(model, num_beams=1, ids=PROMPT + 1) == generate(whole, ids=PROMPT + 1)
                assert session.recoveries == []


def test_streams_that_nobody_uses_are_closed_and_opened_again(
    tiny_llama: Path, whole: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lilliput.server.push.IDLE_SECONDS", 0.3)
    with (
        here(tiny_llama) as servers,
        connected(tiny_llama, servers[0].addresses) as model,
        model.inference_session(max_length=64) as session,
    ):
        used: set[Any] = set()
        for _ in range(2):
            session.position = 0
            assert generate(model) == generate(whole)
            streams = {stream for server in servers for stream in server.service.pushes._streams.values()}  # type: ignore[union-attr]
            assert not streams & used
            assert len(streams) == 2
            until = time.monotonic() + 20
            while not all(stream.ended for stream in streams):
                assert time.monotonic() < until
                time.sleep(0.05)
            used |= streams
        assert session.recoveries == []


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_server_dies_while_others_push(victim: int, swarm: LocalSwarm, tiny_llama: Path, whole: Any) -> None:
    """At any moment of a step, also of a long prefix in parts and of one with reordered rows."""
    swarm.start([SPANS[victim]] * 2)
    of_span = [server for server in swarm.servers if server.blocks == SPANS[victim]]
    by_peer = {server.peer_id: server for server in of_span}
    long = torch.randint(5, 250, (1, 1900), generator=torch.Generator().manual_seed(1))
    beams = {"num_beams": 4, "max_new_tokens": 40}
    expected_long, expected_beams = generate(whole, ids=long), generate(whole, **beams)
    with connected(tiny_llama, swarm.initial_peers) as model:

        def kill_soon(session: Any, delay: float) -> threading.Timer:
            def kill() -> None:
                serving = next(hop.peer_id for hop in session.hops if hop.start == SPANS[victim][0])
                os.kill(by_peer[serving].pid, signal.SIGKILL)

            timer = threading.Timer(delay, kill)
            timer.start()
            return timer

        with model.inference_session(max_length=2000) as session:
            session.step(torch.randn(1, 1, 64))  # so that it is open
            session.position = 0
            timer = kill_soon(session, 0.2)
            assert generate(model, ids=long) == expected_long
            timer.join()
        with model.inference_session(max_length=100, rows=4) as session:
            timers: list[threading.Timer] = []

            def between(call: int) -> None:
                if call == 12:
                    timers.append(kill_soon(session, 0.005))

            assert generate(model, between, **beams) == expected_beams
            timers[0].join()
            assert 1 <= len(session.recoveries) <= 2


@pytest.mark.parametrize("rows", [1, 3])
def test_a_frozen_server_that_wakes_changes_nothing(rows: int, swarm: LocalSwarm, tiny_llama: Path, whole: Any) -> None:
    """What it then pushes is late: the session has moved on, and is not rolled back."""
    swarm.start([SPANS[1]])
    by_peer = {server.peer_id: server for server in swarm.servers}
    options = {"num_beams": rows, "max_new_tokens": 30}
    expected = generate(whole, **options)
    with (
        connected(tiny_llama, swarm.initial_peers) as model,
        model.inference_session(max_length=100, rows=rows) as session,
    ):
        frozen: list[int] = []

        def between(call: int) -> None:
            if call == 5:
                frozen.append(by_peer[session.hops[1].peer_id].pid)
                os.kill(frozen[0], signal.SIGSTOP)
            if call == 8:
                os.kill(frozen[0], signal.SIGCONT)
                time.sleep(0.05)

        assert generate(model, between, **options) == expected
        assert len(session.recoveries) == 1
        assert session.recoveries[0].seconds < 10
