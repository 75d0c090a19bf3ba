"""What servers return is computed once more by others: who lies is found out, and nobody who is honest."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoTokenizer

from lilliput import AutoDistributedModelForCausalLM, RemoteSequential
from lilliput.cli.local_swarm import LocalSwarm
from lilliput.cli.nursery import Nursery
from lilliput.client import audits
from lilliput.client.async_session import AsyncInferenceSession
from lilliput.client.session import InferenceSession
from lilliput.errors import BadRequest, Disputed
from lilliput.models.sources import ModelFiles

GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "max_new_tokens": 6}
PROMPT = torch.arange(5, 45)[None]
MIDDLE = 2, 4


@pytest.fixture(scope="module")
def swarm(tiny_llama: Path, nursery: Nursery) -> Iterator[LocalSwarm]:
    """One server for each two blocks, which are honest."""
    with LocalSwarm(
        str(tiny_llama), [(0, 2), MIDDLE, (4, 6)], options=["--dtype", "float32"], nursery=nursery
    ) as swarm:
        yield swarm


@pytest.fixture(scope="module")
def liar(swarm: LocalSwarm, tiny_llama: Path) -> Iterator[str]:
    """The peer id of a server of the middle blocks whose outputs are wrong by two fifths of what they should change."""
    arguments = [str(Path(__file__).with_name("lying_server.py")), str(tiny_llama), *map(str, MIDDLE), "0.4"]
    process = subprocess.Popen([sys.executable, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(swarm.initial_peers) + "\n")
        process.stdin.flush()
        yield process.stdout.readline().strip()
        process.stdin.close()


@contextlib.contextmanager
def audited(swarm: LocalSwarm, model: Path, avoid: list[str], audit: float = 1.0, **options: Any) -> Iterator[Any]:
    """The model, whose chains begin without the peers in `avoid` where they can."""
    distributed = AutoDistributedModelForCausalLM.from_pretrained(
        str(model), initial_peers=swarm.initial_peers, dtype="float32", audit=audit, **options
    )
    pass_over(distributed, avoid)
    try:
        yield distributed
    finally:
        distributed.close()


def pass_over(model: Any, peers: list[str]) -> None:
    """New chains are made without these, where they can be."""
    for peer in peers:
        model._shared.connection.ban(peer)


def honest(swarm: LocalSwarm) -> list[str]:
    """Peers that serve the middle blocks, and do it well."""
    return [server.peer_id for server in swarm.servers if server.blocks == MIDDLE]


def test_of_two_who_differ_neither_is_believed(swarm: LocalSwarm, liar: str, tiny_llama: Path) -> None:
    with audited(swarm, tiny_llama, honest(swarm)) as model, pytest.raises(Disputed, match="blocks 2:4") as error:
        model.generate(PROMPT, **GREEDY)
    assert set(error.value.peers) == {liar, *honest(swarm)}


def test_of_two_who_differ_the_trusted_one_is_believed(
    swarm: LocalSwarm, liar: str, tiny_llama: Path, whole: Any
) -> None:
    trusted = [server.peer_id for server in swarm.servers]
    with audited(swarm, tiny_llama, honest(swarm), trusted_peers=trusted) as model:
        with model.inference_session(max_length=64) as session:
            answer = model.generate(PROMPT, **GREEDY)
            assert session.audits.convicted == [liar]
        assert answer.tolist() == whole.generate(PROMPT, **GREEDY).tolist()


@pytest.fixture(scope="module")
def another(swarm: LocalSwarm) -> None:
    """A third server of the middle blocks."""
    swarm.add(MIDDLE)


@pytest.mark.usefixtures("another")
class TestThree:
    """Of servers for the middle blocks; one lies."""

    def test_a_liar_is_banned_and_the_step_redone(
        self, swarm: LocalSwarm, liar: str, tiny_llama: Path, whole: Any
    ) -> None:
        expected = whole.generate(PROMPT, **GREEDY)
        with audited(swarm, tiny_llama, honest(swarm), audit=0.0) as model:
            assert model.generate(PROMPT, **GREEDY).tolist() != expected.tolist()  # else there is nothing to find
        with audited(swarm, tiny_llama, honest(swarm)) as model:
            with model.inference_session(max_length=64) as session:
                answer = model.generate(PROMPT, **GREEDY)
                assert answer.tolist() == expected.tolist()
                assert session.audits.convicted == [liar]
                (recovery,) = session.recoveries
                assert (recovery.start, recovery.end, recovery.peer_id) == (*MIDDLE, liar)
                assert "others compute something else" in recovery.why
                # of the other servers nobody else holds the blocks
                assert session.audits.agreed == GREEDY["max_new_tokens"]
                assert session.audits.unable >= 2 * GREEDY["max_new_tokens"]
            # what beams, batches and rollbacks make of the caches is audited as well, and nobody is accused
            for options in ({"num_beams": 3}, {"do_sample": True, "num_return_sequences": 3}):
                with model.inference_session(max_length=64, rows=3) as session:
                    model.generate(PROMPT, **{**GREEDY, **options})
                    session.position -= 3
                    model.generate(session.tokens[:1, :40], **GREEDY)
                    assert session.audits.agreed
                    assert not session.audits.convicted
                    assert liar not in {hop.peer_id for hop in session.hops}

    def test_a_liar_who_audits_accuses_nobody(
        self, swarm: LocalSwarm, liar: str, tiny_llama: Path, whole: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(audits._chance, "choice", lambda able: liar if liar in able else able[0])
        with (
            audited(swarm, tiny_llama, [liar]) as model,
            model.inference_session(max_length=64) as session,
        ):
            answer = model.generate(PROMPT, **GREEDY)
            assert answer.tolist() == whole.generate(PROMPT, **GREEDY).tolist()
            assert (session.audits.convicted, session.recoveries) == ([liar], [])

    def test_what_came_of_earlier_lies_is_forgotten(
        self, swarm: LocalSwarm, liar: str, tiny_llama: Path, whole: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        draws = iter([1.0] * 15)  # two steps of three servers, and three of another session, are not audited
        monkeypatch.setattr(audits._chance, "random", lambda: next(draws, 0.0))
        with (
            audited(swarm, tiny_llama, honest(swarm)) as model,
            model.inference_session(max_length=64) as other,
        ):
            begun = model.generate(PROMPT, **{**GREEDY, "max_new_tokens": 2})
            pass_over(model, honest(swarm))
            with model.inference_session(max_length=64) as session:
                answer = model.generate(PROMPT, **GREEDY)
                assert session.audits.convicted == [liar]
            continued = model.generate(begun, **GREEDY)
            assert [(r.peer_id, r.why.endswith("found out in another session")) for r in other.recoveries] == [
                (liar, True)
            ]
        assert continued.tolist() == whole.generate(begun, **GREEDY).tolist()
        given_out = PROMPT.shape[1] + 3
        rest = {**GREEDY, "max_new_tokens": GREEDY["max_new_tokens"] - 3}
        assert answer.tolist() == whole.generate(answer[:, :given_out], **rest).tolist()
        assert answer.tolist() != whole.generate(PROMPT, **GREEDY).tolist()


def test_nobody_is_accused_for_computing_in_fewer_bits(demo_model: ModelFiles, nursery: Nursery) -> None:
    """bfloat16, weights of 8 bits, and a cache of 8 bits, on a text's real hidden states."""
    ids = torch.tensor(AutoTokenizer.from_pretrained(demo_model.path)(__doc__ * 3)["input_ids"])
    with safe_open(min(demo_model.path.glob("*.safetensors")), "pt") as weights:
        hidden = weights.get_tensor("model.embed_tokens.weight")[ids[:60].reshape(2, 30)]
    with LocalSwarm("smollm2", [(0, 5)], options=["--cache-tokens", "2048"], nursery=nursery) as swarm:
        swarm.start([(0, 5)], ["--quantize", "int8"])
        swarm.start([(0, 5)], ["--cache-dtype", "int8"])
        blocks = RemoteSequential.from_pretrained("smollm2", initial_peers=swarm.initial_peers)
        remote = replace(blocks.remote_model, audit=1.0, push=False)
        for server in swarm.servers:
            for other in swarm.servers:  # each is audited by the others
                if other is not server:
                    remote.connection.ban(other.peer_id)
            session = InferenceSession(blocks._shared, AsyncInferenceSession(remote, 0, 5, max_length=30, rows=2))
            session.step(hidden[:, :22])
            remote.connection._banned.forget()
            for at in range(22, 30):
                session.step(hidden[:, at : at + 1])
            assert [hop.peer_id for hop in session.hops] == [server.peer_id]
            assert (session.audits.agreed, session.audits.convicted, session.audits.unable) == (9, [], 0)
            session.close()
        blocks.close()


def test_shares_that_make_no_sense(swarm: LocalSwarm, tiny_llama: Path) -> None:
    with pytest.raises(BadRequest, match=r"from 0 to 1, not 1\.5"), audited(swarm, tiny_llama, [], audit=1.5):
        pass
