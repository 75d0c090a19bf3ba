"""Chains over any set of spans."""

from __future__ import annotations

import random
import time

import pytest

from lilliput.client.route import find_chain
from lilliput.errors import MissingBlocks
from lilliput.swarm.records import ServerRecord


def server(name: str, start: int, end: int, **facts: object) -> ServerRecord:
    return ServerRecord.model_validate({"peer_id": name, "model": "m", "start": start, "end": end, **facts})


def spans(records: list[ServerRecord], start: int, end: int, **options: object) -> list[tuple[str, int, int]]:
    return [(hop.peer_id, hop.start, hop.end) for hop in find_chain(records, start, end, **options)]  # type: ignore[arg-type]


def test_spans_that_overlap_make_a_chain() -> None:
    chain = spans([server("a", 0, 12), server("b", 8, 30)], 0, 30)
    assert [name for name, _, _ in chain] == ["a", "b"]
    assert chain[0][1] == 0
    assert 8 <= chain[0][2] == chain[1][1] <= 12
    assert chain[1][2] == 30


def test_a_run_in_the_middle_uses_parts_of_spans() -> None:
    assert spans([server("a", 0, 12), server("b", 12, 30)], 5, 15) == [("a", 5, 12), ("b", 12, 15)]
    assert spans([server("a", 0, 12)], 3, 4) == [("a", 3, 4)]


def test_fewest_hops_win_over_speed() -> None:
    records = [server("slow", 0, 30, step_ms=500), server("a", 0, 15, step_ms=1), server("b", 15, 30, step_ms=1)]
    assert spans(records, 0, 30) == [("slow", 0, 30)]


def test_among_equals_the_faster_the_shorter_queue_and_the_freer_cache_win() -> None:
    def best(**worse_and_better: tuple[object, object]) -> str:
        worse = {key: values[0] for key, values in worse_and_better.items()}
        better = {key: values[1] for key, values in worse_and_better.items()}
        records = [server("worse", 0, 30, **worse), server("better", 0, 30, **better)]
        return spans(records, 0, 30)[0][0]

    assert best(step_ms=(20, 10)) == "better"
    assert best(tokens_per_second=(10, 20)) == "better"
    assert best(queue_length=(3, 0), step_ms=(1, 30)) == "better"
    assert best(cache_tokens=(100, 100), cache_tokens_free=(0, 50)) == "better"


def test_where_spans_overlap_the_faster_server_gets_the_common_blocks() -> None:
    slow, fast = {"step_ms": 100}, {"step_ms": 10}
    assert spans([server("a", 0, 20, **slow), server("b", 10, 30, **fast)], 0, 30) == [("a", 0, 10), ("b", 10, 30)]
    assert spans([server("a", 0, 20, **fast), server("b", 10, 30, **slow)], 0, 30) == [("a", 0, 20), ("b", 20, 30)]


def test_missing_blocks_are_named() -> None:
    with pytest.raises(MissingBlocks, match="3:5, 20:30") as error:
        find_chain([server("a", 0, 3), server("b", 5, 20)], 0, 30)
    assert error.value.blocks == ((3, 5), (20, 30))
    with pytest.raises(MissingBlocks) as error:
        find_chain([], 4, 9)
    assert error.value.blocks == ((4, 9),)


def test_servers_that_join_or_leave_or_are_banned_are_passed_over() -> None:
    records = [server("leaving", 0, 30, state="draining"), server("coming", 0, 30, state="joining")]
    with pytest.raises(MissingBlocks):
        find_chain(records, 0, 30)
    records += [server("a", 0, 30), server("b", 0, 10), server("c", 10, 30)]
    assert spans(records, 0, 30) == [("a", 0, 30)]
    assert [name for name, _, _ in spans(records, 0, 30, banned={"a"})] == ["b", "c"]
    with pytest.raises(MissingBlocks):
        find_chain(records, 0, 30, banned={"a", "c"})


def test_every_chain_is_whole_and_shortest_in_random_swarms() -> None:
    rng = random.Random(7)
    for _ in range(200):
        blocks = rng.randint(1, 12)
        records = []
        for index in range(rng.randint(1, 12)):
            start = rng.randrange(blocks)
            records.append(server(str(index), start, rng.randint(start + 1, blocks), step_ms=rng.random() * 10))
        reach, hops = 0, 0
        while reach < blocks:  # greedy is shortest
            further = max((r.end for r in records if r.start <= reach), default=reach)
            if further <= reach:
                break
            reach, hops = further, hops + 1
        if reach < blocks:
            with pytest.raises(MissingBlocks):
                find_chain(records, 0, blocks)
            continue
        chain = find_chain(records, 0, blocks)
        assert len(chain) == hops
        assert [hop.start for hop in chain] == [0, *(hop.end for hop in chain[:-1])]
        assert chain[-1].end == blocks
        assert all(hop.record.start <= hop.start < hop.end <= hop.record.end for hop in chain)


def test_thousands_of_servers_take_milliseconds() -> None:
    rng = random.Random(1)
    records = []
    for index in range(3000):
        start = rng.randrange(126)
        records.append(server(str(index), start, min(126, start + rng.randint(1, 12)), step_ms=rng.random() * 50))
    begin = time.perf_counter()
    chain = find_chain(records, 0, 126)
    assert chain[-1].end == 126
    assert time.perf_counter() - begin < 0.5
