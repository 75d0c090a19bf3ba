"""Where the time of an answer goes: shares of it, and real answers over servers behind an emulated network."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lilliput import AutoDistributedModelForCausalLM
from lilliput.cli.bench.network import Link, Network
from lilliput.cli.local_swarm import LocalSwarm
from lilliput.cli.nursery import Nursery
from lilliput.client.answer_trace import AnswerTrace, Place, Spent
from lilliput.client.async_session import AsyncInferenceSession
from lilliput.client.decoder import Decoder, EndsTime
from lilliput.client.step_trace import Crossing, HopTime, StepTrace

SPANS = [(0, 2), (2, 4), (4, 6)]
AWAY = 0.05
TOKENS = 6


def hop(number: int, computing: float, there_and_back: float = 0.0) -> HopTime:
    return HopTime("abc"[number], *SPANS[number], 0.001, computing, there_and_back)


def step(seconds: float, *crossings: Crossing, opening: float = 0.0, recovering: float = 0.0) -> StepTrace:
    return StepTrace(1, seconds, opening, 0.0, recovering, 0.0, crossings)


def answer(*steps: StepTrace) -> AnswerTrace:
    trace = AnswerTrace()
    for taken in steps:
        trace.saw_step(taken)
        trace.saw_ends(EndsTime(0.0, 0.0, 0.0))
    return trace


def sums(spent: list[Spent]) -> tuple[float, float]:
    return sum(one.first for one in spent), sum(one.total for one in spent)


def test_what_is_carried_is_measured_for_each_server() -> None:
    crossings = [Crossing(0.1, (hop(0, 0.03),)), Crossing(0.3, (hop(1, 0.05),))]
    trace = answer(step(0.5, *crossings, opening=0.05), step(0.41, *crossings))
    spent = {one.place: one for one in trace.spent({})}
    assert spent[Place("network", "a", 0, 2)].first == pytest.approx(0.1 - 0.031)
    assert spent[Place("network", "b", 2, 4)].median == pytest.approx(0.3 - 0.051)
    assert spent[Place("compute", "b", 2, 4)].total == pytest.approx(0.1)
    assert (spent[Place("opening")].first, spent[Place("opening")].most) == (0.05, 0.0)
    assert not any(one.estimated for one in spent.values())
    assert sums(list(spent.values())) == pytest.approx((trace.first_seconds, trace.seconds))


def test_what_is_pushed_is_shared_out_as_the_ways_are_long() -> None:
    unknown = Crossing(0.2, (hop(0, 0.02), hop(1, 0.02), hop(2, 0.02)))
    known = Crossing(0.2, (hop(0, 0.02, 0.06), hop(1, 0.02, 0.02), hop(2, 0.02)))
    trace = answer(step(0.2, unknown), step(0.2, known), step(0.2, known))
    spent = {one.place: one for one in trace.spent({"a": 0.02, "c": 0.04})}
    ways = [spent[Place("network", "abc"[n], *SPANS[n])] for n in range(3)] + [spent[Place("back")]]
    network = 0.2 - 0.063
    for way, share in zip(ways, (1, 3, 1, 2), strict=True):
        assert way.estimated
        assert way.first == way.median == way.most == pytest.approx(network * share / 7)
        assert way.total == pytest.approx(3 * way.first)
    # nobody has measured anything: all ways are taken to be alike
    alike = {one.place: one for one in answer(step(0.2, unknown)).spent({"a": None})}
    assert alike[Place("back")].first == pytest.approx(network / 4)


def test_what_failed_and_others_took_over_is_named() -> None:
    trace = answer(step(1.0, Crossing(0.4, ()), Crossing(0.2, (hop(0, 0.1),)), recovering=0.3))
    spent = {one.place.name: one.first for one in trace.spent({})}
    assert (spent["lost"], spent["recovering"], spent["compute"]) == (0.4, 0.3, 0.1)
    assert sum(spent.values()) == pytest.approx(trace.seconds)


def test_parts_at_the_same_time_are_more_than_the_whole() -> None:
    long = step(0.5, *[Crossing(0.4, (hop(0, 0.3),))] * 2)
    assert long.rest == pytest.approx(-0.3)
    trace = answer(long)
    assert trace.spent({})[-1].place == Place("rest")
    assert trace.spent({})[-1].first < 0
    assert sums(trace.spent({})) == pytest.approx((trace.seconds, trace.seconds))


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with Network() as network:
        yield network


@pytest.fixture(scope="module")
def links(network: Network) -> list[Link]:
    """The server in the middle is far from everybody."""
    return [network.link(), network.link(delay=AWAY), network.link()]


@pytest.fixture(scope="module")
def far(tiny_llama: Path, nursery: Nursery, links: list[Link]) -> Iterator[LocalSwarm]:
    options = ["--dtype", "float32", "--log-json"]
    with LocalSwarm(str(tiny_llama), SPANS, options=options, links=links, nursery=nursery) as swarm:
        yield swarm


@pytest.fixture(scope="module")
def decoder(far: LocalSwarm, tiny_llama: Path) -> Iterator[Decoder]:
    model = AutoDistributedModelForCausalLM.from_pretrained(
        str(tiny_llama), initial_peers=far.initial_peers, dtype="float32", request_id="of-the-model"
    )
    decoder = Decoder(model)
    yield decoder
    decoder.close()
    model.close()


@pytest.fixture(scope="module")
def traced(decoder: Decoder) -> Callable[..., tuple[AnswerTrace, list[Spent]]]:
    def generate(push: bool, request_id: str = "") -> tuple[AnswerTrace, list[Spent]]:
        async def generate() -> tuple[AnswerTrace, list[Spent]]:
            remote, trace = replace(decoder.remote, push=push), AnswerTrace()
            session = AsyncInferenceSession(remote, max_length=64, request_id=request_id, on_step=trace.saw_step)
            stream = decoder.stream([1, 2, 3], max_new_tokens=TOKENS, session=session, on_ends=trace.saw_ends)
            try:
                assert len([token async for token in stream]) == TOKENS
                ways = await remote.connection.round_trips([hop.record for hop in session.hops], within=10.0)
                return trace, trace.spent(ways)
            finally:
                await session.close()

        return decoder.run(generate())

    return generate


def test_a_far_server_shows_as_its_network(
    far: LocalSwarm, traced: Callable[..., tuple[AnswerTrace, list[Spent]]]
) -> None:
    trace, spent = traced(push=False)
    assert trace.tokens == TOKENS
    assert sums(spent) == pytest.approx((trace.first_seconds, trace.seconds))
    times = {one.place: one for one in spent}
    away = times[Place("network", far.servers[1].peer_id, 2, 4)]
    assert not away.estimated
    assert min(away.first, away.median) >= 2 * AWAY  # there and back
    assert away.total >= TOKENS * 2 * AWAY
    assert Place("back") not in times
    for server, span in zip(far.servers, SPANS, strict=True):
        for name in ("network", "queue", "compute"):
            assert times[Place(name, server.peer_id, *span)].total > 0


def test_where_servers_push_the_ways_share_what_is_measured(
    far: LocalSwarm, traced: Callable[..., tuple[AnswerTrace, list[Spent]]]
) -> None:
    trace, spent = traced(push=True)
    assert sums(spent) == pytest.approx((trace.first_seconds, trace.seconds))
    times = {one.place: one for one in spent}
    to_it, from_it = (times[Place("network", far.servers[n].peer_id, *SPANS[n])] for n in (1, 2))
    assert to_it.estimated
    assert from_it.estimated
    ways = [one for one in spent if one.place.name in ("network", "back")]
    assert len(ways) == 4
    # the two long ones are known to take so much each; however long the others seem, these are the greater part
    assert sum(way.median for way in ways) >= 2 * AWAY
    assert to_it.median + from_it.median > sum(way.median for way in ways) / 2


def test_the_servers_name_the_request(
    traced: Callable[..., tuple[AnswerTrace, list[Spent]]], capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    traced(True, "req-of-mine")
    traced(True)
    found: dict[str, list[str]] = {"req-of-mine": [], "of-the-model": []}
    deadline = time.monotonic() + 30
    while any(sum("closed after" in said for said in lines) < len(SPANS) for lines in found.values()):
        for line in capsys.readouterr().err.splitlines():
            facts = json.loads(line)
            if "session" in facts:
                found[facts["request_id"]].append(facts["message"])
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for lines in found.values():
        assert sum("opened after" in said for said in lines) == len(SPANS)
