"""One peer that brings many prompts beside eight that bring one each."""

from __future__ import annotations

import threading
from pathlib import Path

import torch

from lilliput.engine.engine import Engine
from lilliput.engine.scheduler import Budget
from lilliput.engine.session import Step, StepOutput
from lilliput.errors import LilliputError
from lilliput.models.sources import resolve
from lilliput.models.span import Span

HIDDEN, LENGTH = 64, 96


def test_eight_peers_wait_for_no_more_than_their_share_of_what_a_greedy_one_brings(tiny_llama: Path) -> None:
    span = Span.load(resolve(str(tiny_llama)), 0, 2, dtype=torch.float32)
    engine = Engine(span, pages=256, page_size=16, budget=Budget(alone=LENGTH))
    engine.start()
    order: list[str] = []
    finished = threading.Event()
    try:
        peers = ["greedy"] * 20 + [f"other {number}" for number in range(8)]
        sessions = [engine.open(0, 2, rows=1, max_length=LENGTH, peer=peer, bid=peer == "greedy") for peer in peers]

        def bring(peer: str, session: int) -> None:
            def done(result: StepOutput | LilliputError) -> None:
                assert isinstance(result, StepOutput)
                order.append(peer)
                if len(order) == len(peers):
                    finished.set()

            engine.submit(sessions[session].result(10), Step(torch.randn(1, LENGTH, HIDDEN), done=done))

        gate = threading.Event()
        held = engine.call(gate.wait)  # until all have come
        for number, peer in enumerate(peers):
            bring(peer, number)
        gate.set()
        held.result(10)
        assert finished.wait(60)
    finally:
        engine.stop()
    # one after the other, as long as there are others; its higher bid is worth nothing towards them
    assert order == ["greedy", *peers[20:], *["greedy"] * 19]
