"""Which spans servers take, and when they move."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest

from lilliput.cli.simulate.flow import most_throughput
from lilliput.cli.simulate.world import Scenario, World
from lilliput.swarm.placement import Coverage, Span, best_span, better_claim, better_span
from lilliput.swarm.records import ServerRecord


def server(name: str, start: int, end: int, rate: float | None = 10.0, **facts: object) -> ServerRecord:
    """:param rate: tokens a second through one block"""
    throughput = rate and rate / (end - start)
    return ServerRecord.model_validate(
        {"peer_id": name, "model": "m", "start": start, "end": end, "throughput": throughput, **facts}
    )


def joined(lengths: list[int], blocks: int) -> list[Span]:
    """The spans of servers that come one after the other."""
    records: list[ServerRecord] = []
    for number, length in enumerate(lengths):
        start, end = best_span(Coverage.of(records, blocks), length, 10.0)
        records.append(server(str(number), start, end))
    return [(record.start, record.end) for record in records]


def test_too_few_servers_grow_together_from_the_front() -> None:
    assert joined([10, 10, 4], 30) == [(0, 10), (10, 20), (20, 24)]
    assert joined([40], 30) == [(0, 30)]


def test_a_hole_comes_first_and_then_the_blocks_with_one_server() -> None:
    records = [server("a", 0, 10), server("b", 14, 30), server("c", 0, 10), server("d", 20, 30)]
    start, end = best_span(Coverage.of(records, 30), 6, 1.0)
    assert start <= 10
    assert end >= 14
    records.append(server("e", 10, 14))
    assert best_span(Coverage.of(records, 30), 10, 1.0) == (10, 20)


def test_the_slow_blocks_get_help_when_there_are_servers_enough() -> None:
    fast = [server(f"f{n}", 0, 15, 100.0) for n in range(5)]
    slow = [server(f"s{n}", 15, 30, 10.0) for n in range(5)]
    start, _ = best_span(Coverage.of([*fast, *slow], 30), 15, 50.0)
    assert start == 15


def test_who_joins_counts_where_it_goes_and_who_leaves_does_not_count() -> None:
    records = [server("a", 0, 10, state="joining")]
    assert best_span(Coverage.of(records, 20), 10, 10.0) == (10, 20)
    records.append(server("b", 10, 20, state="draining"))
    assert best_span(Coverage.of(records, 20), 10, 10.0) == (10, 20)
    records[-1] = server("b", 0, 10, moving_to=(10, 20))
    assert best_span(Coverage.of(records, 20), 10, 10.0) == (0, 10)


def test_two_that_chose_the_same_part_at_the_second_look() -> None:
    claim = server("b", 0, 10, state="joining")
    assert better_claim(Coverage.of([claim], 20), (0, 10), 10.0) == (10, 20)
    assert better_claim(Coverage.of([claim.model_copy(update={"start": 10, "end": 20})], 20), (0, 10), 10.0) is None


def test_nobody_moves_away_from_blocks_that_no_other_serves() -> None:
    others = [server("b", 0, 5)]
    assert better_span(Coverage.of(others, 30), (0, 10), 10.0) is None
    for leaving in (server("c", 0, 10, moving_to=(10, 20)), server("c", 0, 10, state="draining")):
        assert better_span(Coverage.of([leaving], 30), (0, 10), 10.0) is None
    assert better_span(Coverage.of([server("c", 0, 10)], 30), (0, 10), 10.0) == (10, 20)


def test_a_small_gain_moves_nobody() -> None:
    records = [server(f"{n}", start, start + 10) for n in range(8) for start in (0, 10, 20)]
    assert better_span(Coverage.of(records[1:], 30), (0, 10), 10.0) is None


def test_moves_come_to_an_end() -> None:
    chance = random.Random(1)
    blocks = 40
    servers = {}
    for number in range(60):
        length = chance.choice((2, 4, 8, 16))
        start = chance.randrange(0, 12) if length < 16 else 0
        servers[str(number)] = server(str(number), start, start + length, chance.lognormvariate(3.0, 0.8))
    moves = 0
    for _ in range(40):
        moved = False
        for name, record in servers.items():
            others = Coverage.of(servers.values(), blocks, without=name)
            rate = (record.throughput or 0.0) * (record.end - record.start)
            if (span := better_span(others, (record.start, record.end), rate)) is not None:
                servers[name] = server(name, *span, rate)
                moves, moved = moves + 1, True
        if not moved:
            break
    assert not moved
    assert moves <= 4 * len(servers)
    coverage = Coverage.of(servers.values(), blocks)
    assert coverage.holders.min() >= 2
    assert coverage.rates.min() > 0.5 * coverage.rates.mean()


def test_what_strangers_say_breaks_nothing() -> None:
    odd = [
        server("a", 0, 999),
        server("b", 500, 600),
        server("c", 0, 4, moving_to=(900, 1000)),
        server("d", 0, 3, None),
    ]
    coverage = Coverage.of(odd, 10)
    assert best_span(coverage, 4, 1.0)[1] <= 10
    for record in odd:
        coverage.add(record, sign=-1)
    assert not coverage.holders.any()


def test_most_throughput_is_that_of_the_scarcest_set_of_blocks() -> None:
    assert most_throughput([(0, 2, 10.0), (2, 4, 6.0)], 4) == pytest.approx(3.0)
    # the wide one gives all it has to the half where the other is weak
    assert most_throughput([(0, 4, 4.0), (0, 2, 8.0), (2, 4, 4.0)], 4) == pytest.approx(4.0)
    assert most_throughput([(0, 2, 5.0)], 4) == 0.0
    servers = [(s, s + 3, 1.0 + s) for s in range(8)]
    even = np.zeros(10)
    for start, end, rate in servers:
        even[start:end] += rate / (end - start)
    assert even.min() <= most_throughput(servers, 10) <= sum(rate for *_, rate in servers) / 10


def test_a_simulated_swarm_that_comes_and_goes_keeps_every_block_served() -> None:
    facts = World(Scenario(70, 1.39, hours=2.0, coverage=5.0)).run().facts()
    assert facts["departures"]
    assert facts["served_share_of_time"] == 1.0
    assert facts["throughput_share"] >= 0.9
    again = World(Scenario(70, 1.39, hours=2.0, coverage=5.0)).run().facts()
    assert {k: v for k, v in facts.items() if "ms" not in k} == {k: v for k, v in again.items() if "ms" not in k}


def test_a_swarm_that_cannot_cover_the_model_moves_nobody() -> None:
    spans = sorted(joined([8, 8, 8], 40))
    assert all(a[1] == b[0] for a, b in pairwise(spans))
    facts = World(Scenario(70, 1.39, hours=2.0, coverage=0.5, departures=0.0)).run().facts()
    assert facts["moves"] == 0
