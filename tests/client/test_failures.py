"""What users see when something is missing, full, dead or frozen; and that nothing stays behind."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import StoppingCriteria

from lilliput import AutoDistributedModelForCausalLM, RemoteSequential, Server
from lilliput.cli.local_swarm import LocalSwarm
from lilliput.client.async_session import AsyncInferenceSession
from lilliput.client.connection import Patience, SharedConnection
from lilliput.client.session import InferenceSession
from lilliput.errors import Busy, LilliputError, MissingBlocks, ModelError, TooLong, Unreachable
from lilliput.swarm.sockets import remove_stale_sockets

NOBODY = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWS27M6oPeJ9xnpepDXPmQ6x12nLW9HW5h8G5tajeTcZnP"
GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def states(rows: int, tokens: int) -> torch.Tensor:
    return torch.randn(rows, tokens, 64, generator=torch.Generator().manual_seed(tokens))


@contextmanager
def served(model: Path, *spans: tuple[int, int], **options: Any) -> Iterator[list[Server]]:
    """Servers in this process."""
    servers: list[Server] = []
    try:
        for span in spans:
            peers = servers[0].addresses if servers else ()
            server = Server(
                str(model), span, initial_peers=peers, **{"dtype": "float32", "cache_tokens": 4096, **options}
            )
            server.run_in_background()
            servers.append(server)
        yield servers
    finally:
        for server in servers:
            server.shutdown()


@contextmanager
def connected(model: Path, peers: Any, **options: Any) -> Iterator[Any]:
    distributed = AutoDistributedModelForCausalLM.from_pretrained(
        str(model), initial_peers=list(peers), dtype="float32", **options
    )
    try:
        yield distributed
    finally:
        distributed.close()


def test_missing_blocks_are_named_at_once_or_after_the_wait(tiny_llama: Path, whole: Any) -> None:
    with served(tiny_llama, (0, 2)) as servers:
        for wait in (0.0, 1.0):
            begin = time.monotonic()
            with (
                pytest.raises(MissingBlocks, match="2:6 of tiny-llama") as error,
                connected(tiny_llama, servers[0].addresses, wait=wait),
            ):
                pass
            assert error.value.blocks == ((2, 6),)
            assert wait <= time.monotonic() - begin < wait + 10
        late = threading.Timer(0.5, lambda: servers.append(Server(str(tiny_llama), (1, 6), dtype="float32")))
        late.start()
        late.join()
        servers[1]._node_options["initial_peers"] = servers[0].addresses
        servers[1].run_in_background(await_ready=False)
        with connected(tiny_llama, servers[0].addresses, wait=30.0) as model:
            ids = torch.arange(5, 15)[None]
            assert torch.equal(
                model.generate(ids, max_new_tokens=5, **GREEDY), whole.generate(ids, max_new_tokens=5, **GREEDY)
            )


def test_nobody_there(tiny_llama: Path) -> None:
    begin, before = time.monotonic(), set(threading.enumerate())
    with pytest.raises(Unreachable, match="none of the initial peers"), connected(tiny_llama, [NOBODY]):
        pass
    assert time.monotonic() - begin < 20
    assert not [t for t in set(threading.enumerate()) - before if t.name == "lilliput-client"]


def test_another_model_of_the_same_name_is_not_used(tiny_llama: Path, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    other = tmp_path / "tiny-llama"
    config = LlamaConfig.from_pretrained(tiny_llama)
    config.rms_norm_eps = 0.1
    LlamaForCausalLM(config).save_pretrained(other)
    with (
        served(tiny_llama, (0, 6)) as servers,
        pytest.raises(ModelError, match="fingerprint"),
        connected(other, servers[0].addresses),
    ):
        pass


def test_spans_that_overlap_are_chained(tiny_llama: Path, whole: Any) -> None:
    with served(tiny_llama, (0, 4), (2, 6)) as servers, connected(tiny_llama, servers[0].addresses) as model:
        ids = torch.arange(5, 25)[None]
        with model.inference_session(max_length=64) as session:
            answer = model.generate(ids, max_new_tokens=8, **GREEDY)
            assert len(session.hops) == 2
            assert 2 <= session.hops[0].end == session.hops[1].start <= 4
        assert answer.tolist() == whole.generate(ids, max_new_tokens=8, **GREEDY).tolist()


def test_a_full_server_says_busy_and_takes_us_when_there_is_room(tiny_llama: Path) -> None:
    with served(tiny_llama, (0, 6), cache_tokens=64) as servers:
        blocks = RemoteSequential.from_pretrained(str(tiny_llama), initial_peers=list(servers[0].addresses))
        patient = RemoteSequential.from_pretrained(
            str(tiny_llama), initial_peers=list(servers[0].addresses), patience=Patience(queue=20.0)
        )
        first = InferenceSession(blocks._shared, AsyncInferenceSession(blocks.remote_model, max_length=64))
        first.step(states(1, 4))
        second = InferenceSession(blocks._shared, AsyncInferenceSession(blocks.remote_model, max_length=64))
        with pytest.raises(Busy) as error:
            second.step(states(1, 4))
        assert error.value.queue_length == 1
        assert error.value.wait_seconds is not None
        places: list[int] = []
        core = AsyncInferenceSession(
            patient.remote_model, max_length=64, on_queue=lambda hop, info: places.append(info.queue_length)
        )
        third = InferenceSession(patient._shared, core)
        threading.Timer(0.5, first.close).start()
        assert third.step(states(1, 4)).shape == (1, 4, 64)
        assert places == [1]
        third.close()
        with pytest.raises(TooLong, match="65"):
            InferenceSession(blocks._shared, AsyncInferenceSession(blocks.remote_model, max_length=65)).step(
                states(1, 1)
            )
        blocks.close()
        patient.close()


def test_sessions_that_begin_together_find_the_servers_that_have_room(tiny_llama: Path) -> None:
    with served(tiny_llama, *[(0, 6)] * 5, cache_tokens=64) as servers:
        blocks = RemoteSequential.from_pretrained(
            str(tiny_llama), initial_peers=list(servers[0].addresses), patience=Patience(attempts=2)
        )

        def session() -> AsyncInferenceSession:
            return AsyncInferenceSession(blocks.remote_model, max_length=64)

        async def together() -> tuple[set[str], str]:
            # records say that all servers are empty, so all ask the same one first
            sessions = [session() for _ in servers]
            await asyncio.gather(*(opened.step(states(1, 4)) for opened in sessions))
            peers = {hop.peer_id for opened in sessions for hop in opened.hops}
            with pytest.raises(Busy) as error:
                await session().step(states(1, 4))
            await asyncio.gather(*(opened.close() for opened in sessions))
            return peers, str(error.value)

        peers, error = blocks._shared.run(together())
        assert peers == {str(server.dht.peer_id) for server in servers if server.dht}
        assert "full" in error
        blocks.close()


def test_whatever_ends_generate_gives_the_caches_back(tiny_llama: Path) -> None:
    class Break(StoppingCriteria):
        def __init__(self, error: BaseException) -> None:
            self.error = error

        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            raise self.error

    with (
        served(tiny_llama, (0, 6), cache_tokens=64) as servers,
        connected(tiny_llama, servers[0].addresses, patience=Patience(queue=5.0)) as model,
    ):
        ids = torch.arange(5, 25)[None]
        for error in (ZeroDivisionError(), KeyboardInterrupt()):
            with pytest.raises(type(error)):
                model.generate(ids, max_new_tokens=44, stopping_criteria=[Break(error)], **GREEDY)
            assert model.generate(ids, max_new_tokens=44, **GREEDY).shape == (1, 64)  # all of the cache is free again


def test_a_session_that_is_forgotten_gives_its_caches_back(tiny_llama: Path) -> None:
    with (
        served(tiny_llama, (0, 6), cache_tokens=64) as servers,
        connected(tiny_llama, servers[0].addresses, patience=Patience(queue=5.0)) as model,
    ):
        session = model.inference_session(max_length=64)
        session.step(states(1, 4))
        del session
        gc.collect()
        assert model.generate(torch.arange(5, 25)[None], max_new_tokens=44, **GREEDY).shape == (1, 64)


def test_an_interrupt_inside_a_step_ends_it(tiny_llama: Path) -> None:
    with served(tiny_llama, (0, 6)) as servers, connected(tiny_llama, servers[0].addresses) as model:
        engine = servers[0].service.engine  # type: ignore[union-attr]
        submit, engine.submit_all = engine.submit_all, lambda steps: None  # a server that takes steps and never answers
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        begin = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            model.generate(torch.arange(5, 25)[None], max_new_tokens=5, **GREEDY)
        assert time.monotonic() - begin < 10
        engine.submit_all = submit
        assert model.generate(torch.arange(5, 25)[None], max_new_tokens=5, **GREEDY).shape == (1, 25)


class TestProcesses:
    """Servers that are killed or frozen."""

    @pytest.fixture
    def swarm(self, tiny_llama: Path) -> Iterator[LocalSwarm]:
        with LocalSwarm(str(tiny_llama), [(0, 3), (3, 6)], options=["--dtype", "float32"]) as swarm:
            yield swarm
        remove_stale_sockets()

    def test_blocks_of_a_killed_server_are_named_within_a_second(self, swarm: LocalSwarm, tiny_llama: Path) -> None:
        with connected(tiny_llama, swarm.initial_peers, patience=Patience(recovery=0.0)) as model:
            session = model.inference_session(max_length=64)
            session.step(states(1, 4))
            os.kill(swarm.servers[1].pid, signal.SIGKILL)
            begin = time.monotonic()
            with pytest.raises(MissingBlocks, match=r"3:6 of tiny-llama .*connection broke") as error:
                session.step(states(1, 1))
            assert time.monotonic() - begin < 7  # a second, where nothing else runs; silence alone would take eight
            assert error.value.blocks == ((3, 6),)
            with pytest.raises(MissingBlocks, match="3:6"):
                session.step(states(1, 1))
            session.close()

    def test_a_frozen_server_is_given_up(self, swarm: LocalSwarm, tiny_llama: Path) -> None:
        with connected(tiny_llama, swarm.initial_peers, patience=Patience(silence=1.0, recovery=0.0)) as model:
            session = model.inference_session(max_length=64)
            session.step(states(1, 4))
            os.kill(swarm.servers[0].pid, signal.SIGSTOP)
            begin = time.monotonic()
            with pytest.raises(MissingBlocks, match=r"0:3 .*no sign of life"):
                session.step(states(1, 1))
            assert time.monotonic() - begin < 10
            session.close()
            os.kill(swarm.servers[0].pid, signal.SIGCONT)

    def test_forward_and_backward_go_on_at_another_server(
        self, swarm: LocalSwarm, tiny_llama: Path, whole: Any
    ) -> None:
        others = swarm.start([(2, 5), (4, 6)], ["--dtype", "float32"])
        with connected(tiny_llama, swarm.initial_peers) as model:
            for server in others:  # whatever was measured, they come second
                model._shared.connection.ban(server.peer_id)
            blocks = model.remote
            expected = states(2, 9).requires_grad_()
            goal = blocks(expected)
            goal.square().sum().backward()
            mine = states(2, 9).requires_grad_()
            output = blocks(mine)
            model._shared.connection._banned.forget()
            os.kill(swarm.servers[1].pid, signal.SIGKILL)  # 3:6; from now on 2:5 and 4:6
            output.square().sum().backward()
            assert mine.grad is not None
            assert expected.grad is not None
            assert torch.allclose(mine.grad, expected.grad, rtol=1e-3, atol=1e-4 * float(expected.grad.abs().max()))
            assert torch.allclose(blocks(states(2, 9)), goal, atol=1e-3)
            (recovery,) = blocks[1:4].recoveries
            assert (recovery.start, recovery.end, recovery.peer_id) == (3, 6, swarm.servers[1].peer_id)
            assert set(recovery.new_peer_ids) == {server.peer_id for server in swarm.servers[2:]}
            assert recovery.replayed_tokens == 9
            assert recovery.seconds > 0


def test_models_of_one_process_share_a_connection(tiny_swarm: LocalSwarm, tiny_llama: Path) -> None:
    peers = tiny_swarm.initial_peers[:1]

    def daemons() -> int:
        return sum(child.name() == "p2pd" for child in psutil.Process().children())

    before = daemons()
    with connected(tiny_llama, peers) as one:
        with connected(tiny_llama, peers) as two:
            assert one._shared is two._shared
            assert daemons() == before + 1
        assert one.generate(torch.arange(5, 9)[None], max_new_tokens=2, **GREEDY).shape == (1, 6)
    assert daemons() == before
    with pytest.raises(LilliputError, match="closed"):
        one.generate(torch.arange(5, 9)[None], max_new_tokens=2, **GREEDY)
    assert SharedConnection._all.keys() <= {key for key in SharedConnection._all if tuple(sorted(peers)) != key[1]}


def test_a_program_that_closes_nothing_ends_quietly(tiny_swarm: LocalSwarm, tiny_llama: Path) -> None:
    program = (
        "import sys, torch, lilliput\n"
        "model = lilliput.AutoDistributedModelForCausalLM.from_pretrained("
        "sys.argv[1], initial_peers=sys.argv[2:], dtype='float32')\n"
        "session = model.inference_session(max_length=20)\n"
        "session.step(torch.randn(1, 3, 64))\n"
        "print(model.generate(torch.arange(5, 9)[None], max_new_tokens=2, pad_token_id=0).shape)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tiny_llama), *tiny_swarm.initial_peers],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "torch.Size([1, 6])"
    assert "Traceback" not in done.stderr


def test_a_client_whose_daemon_is_killed_starts_another_and_goes_on(
    tiny_swarm: LocalSwarm, tiny_llama: Path, whole: Any
) -> None:
    def daemons() -> set[psutil.Process]:
        return {child for child in psutil.Process().children() if "p2pd" in child.name()}

    ids, others = torch.arange(5, 25)[None], daemons()
    expected = whole.generate(ids, max_new_tokens=12, **GREEDY)
    with (
        # named twice, and so a connection of its own: others to the same swarm may be open
        connected(tiny_llama, [*tiny_swarm.initial_peers, *tiny_swarm.initial_peers]) as model,
        model.inference_session(max_length=64) as session,
    ):
        out = model.generate(ids, max_new_tokens=4, **GREEDY)
        for _ in range(2):
            (daemon,) = daemons() - others
            daemon.kill()
            out = model.generate(out, max_new_tokens=4, **GREEDY)
        assert out.tolist() == expected.tolist()
        assert session.recoveries
    assert not daemons() - others
