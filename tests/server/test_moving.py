"""Servers that nobody told their blocks: they cover the model, and move where somebody is missing."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from raw_client import Peer, Whole
from transformers import AutoModelForCausalLM

from lilliput import AutoDistributedModelForCausalLM, Server
from lilliput.cli.local_swarm import LocalSwarm
from lilliput.cli.nursery import Nursery
from lilliput.client.connection import Patience
from lilliput.errors import MissingBlocks
from lilliput.swarm.records import ServerRecord

GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "max_new_tokens": 10}
OPTIONS = ["--dtype", "float32", "--num-blocks", "3", "--rebalance-seconds", "1", "--cache-tokens", "8192"]


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.2)


class Talk(threading.Thread):
    """A client that generates all the while, each time what the whole model does."""

    def __init__(self, model: Any, expected: dict[int, list[int]]) -> None:
        super().__init__(name="talk")
        self.model, self.expected = model, expected
        self.done, self.answers, self.error = threading.Event(), 0, None

    def run(self) -> None:
        try:
            while not self.done.is_set():
                length = list(self.expected)[self.answers % len(self.expected)]
                try:
                    answer = self.model.generate(torch.arange(5, 5 + length)[None], **GREEDY)
                except MissingBlocks:  # a session that begins while there is a hole; those that run wait for its end
                    time.sleep(0.5)
                    continue
                assert answer[0].tolist() == self.expected[length]
                self.answers += 1
        except BaseException as e:
            self.error = e  # type: ignore[assignment]


@pytest.mark.timeout(240)
def test_servers_cover_the_model_and_fill_a_hole(tiny_llama: Path, nursery: Nursery) -> None:
    whole = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    expected = {n: whole.generate(torch.arange(5, 5 + n)[None], **GREEDY)[0].tolist() for n in (3, 20, 60)}
    with LocalSwarm(str(tiny_llama), [None] * 4, options=OPTIONS, nursery=nursery) as swarm:
        model = AutoDistributedModelForCausalLM.from_pretrained(
            str(tiny_llama), initial_peers=swarm.initial_peers, dtype="float32", patience=Patience(recovery=90.0)
        )
        remote = model._remote_model

        def records() -> list[ServerRecord]:
            found: list[ServerRecord] = model._shared.run(remote.connection.records(remote.name, fresh=True))
            return found

        def holders() -> list[int]:
            serving = [r for r in records() if r.state == "serving"]
            return [sum(r.start <= block < r.end for r in serving) for block in range(6)]

        wait_for(lambda: min(holders()) == 2)  # four servers with three of six blocks each
        assert all(record.throughput for record in records())
        talk = Talk(model, expected)
        talk.start()
        try:
            wait_for(lambda: talk.answers > 0 or talk.error is not None)
            spans = {r.peer_id: (r.start, r.end) for r in records()}
            lost = spans[swarm.servers[0].peer_id]  # that of the swarm's first member, and everyone else's
            for server in swarm.servers:
                if max(lost[0], spans[server.peer_id][0]) < min(lost[1], spans[server.peer_id][1]):
                    server.kill()
            # whoever can be spared moves, with the address and the peer id that it had
            wait_for(lambda: {r.peer_id for r in records()} == {s.peer_id for s in swarm.servers if s.serves})
            wait_for(lambda: min(holders()) >= 1, 90.0)
            assert any((r.start, r.end) != spans[r.peer_id] for r in records())
            before = talk.answers
            wait_for(lambda: talk.answers > before + 2 or talk.error is not None)
        finally:
            talk.done.set()
            talk.join(60)
            model.close()
        if talk.error is not None:
            raise talk.error


def test_a_server_that_cannot_read_the_blocks_it_moves_to_goes_back(
    tiny_llama: Path, whole: Whole, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "tiny"
    AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).save_pretrained(
        folder, max_shard_size="200KB"
    )
    files = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    options: dict[str, Any] = {"dtype": "float32", "cache_tokens": 1024, "rebalance_seconds": 0.5}
    mover = Server(str(folder), num_blocks=3, **options)
    with caplog.at_level(logging.ERROR), mover:
        assert mover.blocks == (0, 3)  # alone
        damaged = folder / files["model.layers.4.mlp.up_proj.weight"]
        damaged.write_bytes(damaged.read_bytes()[:-1])
        with Server(str(folder), (0, 3), initial_peers=mover.addresses, **options):
            wait_for(lambda: "back to" in caplog.text)  # nobody serves blocks 3:6, and it tries to
            wait_for(lambda: mover.service is not None)
            (line,) = (r.getMessage() for r in caplog.records if r.name.startswith("lilliput"))
            assert line.startswith("cannot move to blocks 3:6, so back to 0:3:")
            assert damaged.name in line
            peer = Peer(mover, whole)
            try:
                session = peer.session(0, 3)
                session.go_on(20)
                session.go_on()
                session.bye()
            finally:
                peer.stop()
