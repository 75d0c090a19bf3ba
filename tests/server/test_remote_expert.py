"""hivemind's own client, untouched: `get_experts` finds the blocks, `RemoteExpert` calls them.

It runs in a process of its own, since `hivemind.DHT` forks.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import hivemind.moe
import pytest
import torch
from raw_client import BLOCKS, HIDDEN, TOLERANCE, Peer, Whole, assert_nothing_left, difference, service_of

from lilliput import Server
from lilliput.models.sources import uid_prefix

CLIENT = """
import sys
import hivemind
import torch
from hivemind.moe.client.expert import RemoteExpert
from hivemind.moe.server import get_experts

peers, prefix, folder = sys.argv[1].split(","), sys.argv[2], sys.argv[3]
dht = hivemind.DHT(initial_peers=peers, client_mode=True, start=True)
found = get_experts(dht, [f"{prefix}.{block}" for block in range(7)])
results = {"found": [e is not None for e in found], "type": type(found[0]) is RemoteExpert}
results["info"] = found[0].info["forward_schema"][0][0].shape
results["answers"] = []
for block, inputs, grad in torch.load(folder + "/inputs.pt"):
    inputs.requires_grad_()
    outputs = found[block](inputs)
    outputs.backward(grad)
    results["answers"].append((outputs.detach(), inputs.grad))

# the whole model, as a chain of its experts
inputs, grad = torch.load(folder + "/chain.pt")
inputs.requires_grad_()
outputs = inputs
for expert in found[:6]:
    outputs = expert(outputs)
outputs.backward(grad)
results["chain"] = outputs.detach(), inputs.grad

results["errors"] = []
def attempt(call):
    try:
        call()
        results["errors"].append("nothing")
    except BaseException as e:
        results["errors"].append(f"{type(e).__name__}: {e}")

attempt(lambda: found[1](torch.randn(2, 3, 65)))
attempt(lambda: found[1](torch.full((2, 3, 64), float("nan"))))
attempt(lambda: found[1](torch.full((40, 1000, 64), float("nan"))))
attempt(lambda: found[1](torch.randn(2, 3000, 64)))
attempt(lambda: found[1](torch.randn(64)))
attempt(lambda: found[1](torch.ones(2, 3, 64, dtype=torch.int64)))
elsewhere = found[1]._info._replace(uid=prefix + ".6")
attempt(lambda: RemoteExpert(elsewhere, found[1].p2p).info)
attempt(lambda: RemoteExpert(elsewhere._replace(uid="another.1"), found[1].p2p).info)
results["after"] = found[1](torch.zeros(1, 1, 64)).shape
torch.save(results, folder + "/results.pt")
dht.shutdown()
"""


@pytest.fixture(scope="module")
def results(server: Server, whole: Whole, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("remote-expert")
    torch.manual_seed(3)
    small = [(block, torch.randn(2, 7, HIDDEN), torch.randn(2, 7, HIDDEN)) for block in (0, 3, 5)]
    # 2.3 MB go through the stream forms; for the backward pass 1.3 MB are enough, since the gradients go along
    large = [(4, torch.randn(rows, 100, HIDDEN), torch.randn(rows, 100, HIDDEN)) for rows in (50, 90)]
    torch.save([*small, *large], folder / "inputs.pt")
    torch.save((torch.randn(1, 9, HIDDEN), torch.randn(1, 9, HIDDEN)), folder / "chain.pt")
    # a process that forks at its own risk; what it says of that is no matter
    done = subprocess.run(
        [sys.executable, "-c", CLIENT, ",".join(server.addresses), uid_prefix(service_of(server).model), str(folder)],
        env={**os.environ, "HIVEMIND_LOGLEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    loaded: dict[str, Any] = torch.load(folder / "results.pt", weights_only=False)
    loaded["folder"] = folder
    return loaded


def test_the_server_is_one_of_hivemind(server: Server) -> None:
    assert isinstance(server, hivemind.moe.Server)
    assert server.ready.is_set()
    assert server.dht is not None
    assert [str(address) for address in server.dht.get_visible_maddrs()] == list(server.addresses)
    prefix = uid_prefix(service_of(server).model)
    assert set(server.module_backends) == {f"{prefix}.{block}" for block in range(BLOCKS)}


def test_get_experts_finds_the_blocks_and_no_others(results: dict[str, Any]) -> None:
    assert results["found"] == [True] * BLOCKS + [False]
    assert results["type"]
    assert results["info"][-1] == HIDDEN


def test_forward_and_backward_equal_local_ones(results: dict[str, Any], whole: Whole) -> None:
    """Also above 2 MB, where hivemind takes the stream forms."""
    cases = torch.load(results["folder"] / "inputs.pt")
    assert len(results["answers"]) == len(cases) == 5
    for (block, inputs, grad), (outputs, grads) in zip(cases, results["answers"], strict=True):
        compare(whole, inputs, grad, outputs, grads, block, block + 1)


def test_a_chain_of_experts_is_the_model(results: dict[str, Any], whole: Whole) -> None:
    inputs, grad = torch.load(results["folder"] / "chain.pt")
    compare(whole, inputs, grad, *results["chain"], 0, BLOCKS)


def compare(
    whole: Whole, inputs: torch.Tensor, grad: torch.Tensor, outputs: torch.Tensor, grads: torch.Tensor, *part: int
) -> None:
    inputs = inputs.clone().requires_grad_()
    expected = whole(inputs, *part)
    expected.backward(grad)
    assert inputs.grad is not None
    assert difference(outputs, expected.detach()) < TOLERANCE
    assert difference(grads, inputs.grad) < TOLERANCE


def test_mistakes_are_errors_that_say_what_is_wrong(results: dict[str, Any]) -> None:
    wide, nan, large_nan, long, flat, integers, elsewhere, another = results["errors"]
    assert "[rows, tokens, 64]" in wide
    assert "NaN" in nan
    assert "NaN" in large_nan
    assert "2048" in long
    assert "[rows, tokens, 64]" in flat
    assert "floating-point" in integers
    assert "holds blocks 0:6" in elsewhere
    assert "no block" in another
    assert results["after"] == (1, 1, HIDDEN)


def test_sessions_go_on_meanwhile_and_nothing_is_left(server: Server, peer: Peer, results: dict[str, Any]) -> None:
    session = peer.session()
    session.go_on(9)
    session.bye()
    assert_nothing_left(server)
    assert service_of(server).passes == 0
