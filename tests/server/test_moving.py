"""Servers that nobody told their blocks: they cover the model, and move where somebody is missing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lilliput import AutoDistributedModelForCausalLM
from lilliput.cli.local_swarm import LocalSwarm
from lilliput.cli.nursery import Nursery
from lilliput.swarm.records import ServerRecord

GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "max_new_tokens": 10}
OPTIONS = ["--dtype", "float32", "--num-blocks", "2", "--rebalance-seconds", "1", "--cache-tokens", "8192"]


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
                answer = self.model.generate(torch.arange(5, 5 + length)[None], **GREEDY)
                assert answer[0].tolist() == self.expected[length]
                self.answers += 1
        except BaseException as e:
            self.error = e  # type: ignore[assignment]


@pytest.mark.timeout(240)
def test_servers_cover_the_model_and_fill_a_hole(tiny_llama: Path, nursery: Nursery) -> None:
    whole = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    expected = {n: whole.generate(torch.arange(5, 5 + n)[None], **GREEDY)[0].tolist() for n in (3, 20, 60)}
    with LocalSwarm(str(tiny_llama), [None] * 6, options=OPTIONS, nursery=nursery) as swarm:
        model = AutoDistributedModelForCausalLM.from_pretrained(
            str(tiny_llama), initial_peers=swarm.initial_peers[1:], dtype="float32"
        )
        remote = model._remote_model

        def records() -> list[ServerRecord]:
            found: list[ServerRecord] = model._shared.run(remote.connection.records(remote.name, fresh=True))
            return found

        def holders() -> list[int]:
            serving = [r for r in records() if r.state == "serving"]
            return [sum(r.start <= block < r.end for r in serving) for block in range(6)]

        wait_for(lambda: min(holders()) == 2)  # six servers with two of six blocks each
        assert all(record.throughput for record in records())
        talk = Talk(model, expected)
        talk.start()
        try:
            wait_for(lambda: talk.answers > 0 or talk.error is not None)
            middle = {r.peer_id for r in records() if (r.start, r.end) == (2, 4)}
            for server in swarm.servers[1:]:
                if server.peer_id in middle:
                    server.kill()
            assert len([s for s in swarm.servers if s.process.poll() is None]) <= 5
            # whoever can be spared moves, with the address and the peer id that it had
            wait_for(lambda: min(holders()) >= 1 and len(records()) < 6, 90.0)
            before = talk.answers
            wait_for(lambda: talk.answers > before + 2 or talk.error is not None)
        finally:
            talk.done.set()
            talk.join(60)
            model.close()
        if talk.error is not None:
            raise talk.error
        moved = [s for s in swarm.servers if s.process.poll() is None and s.peer_id]
        assert moved
