"""Chains over any set of spans."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from itertools import pairwise

import pytest

from lilliput.client.costs import PASSES, SESSION, client_round_trips, entry_seconds
from lilliput.client.route import Guard, Hop, estimate, find_chain
from lilliput.errors import MissingBlocks
from lilliput.swarm.records import MOST_FOLLOWERS, ServerRecord


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


def test_fewest_hops_win_among_equals() -> None:
    equal = {"step_ms": 10}
    halves = [server("a", 0, 15, step_ms=5), server("b", 15, 30, step_ms=5)]
    for pushes in (False, True):
        for near in (0.0, 0.05):
            ways = dict.fromkeys("abc", near)
            assert spans([*halves, server("c", 0, 30, **equal)], 0, 30, round_trips=ways, pushes=pushes) == [
                ("c", 0, 30)
            ]


def test_a_further_hop_must_gain_more_than_its_way_takes() -> None:
    halves = [server("a", 0, 15, step_ms=1), server("b", 15, 30, step_ms=1)]
    for step_ms, names in ((60, ["slow"]), (150, ["a", "b"])):
        chain = spans([server("slow", 0, 30, step_ms=step_ms), *halves], 0, 30, round_trips=dict.fromkeys("ab", 0.1))
        assert [name for name, _, _ in chain] == names


def test_the_nearer_of_two_like_servers_wins_and_one_that_does_not_answer_comes_last() -> None:
    records = [server(name, 0, 30, step_ms=20) for name in ("far", "silent", "near")]
    ways = {"far": 0.08, "near": 0.02, "silent": None}
    assert spans(records, 0, 30, round_trips=ways)[0][0] == "near"
    assert spans(records, 0, 30, round_trips=ways, banned={"near"})[0][0] == "far"
    assert spans(records, 0, 30, round_trips=ways, banned={"near", "far"})[0][0] == "silent"


def test_where_servers_push_what_lies_between_them_counts_and_the_way_back_only_once() -> None:
    # a and b are far from the client and next to each other; c and d are nearer, but far from each other
    first = [
        server("a", 0, 15, step_ms=10, followers=[["b", 1.0], ["d", 80.0]]),
        server("c", 0, 15, step_ms=10, followers=[["b", 80.0], ["d", 90.0]]),
    ]
    records = [*first, server("b", 15, 30, step_ms=10), server("d", 15, 30, step_ms=10)]
    ways = {"a": 0.06, "b": 0.06, "c": 0.05, "d": 0.05}
    assert [name for name, _, _ in spans(records, 0, 30, round_trips=ways)] == ["c", "d"]
    assert [name for name, _, _ in spans(records, 0, 30, round_trips=ways, pushes=True)] == ["a", "b"]


def test_training_passes_prefer_rate_to_nearness() -> None:
    near = server("near", 0, 30, step_ms=10, prefill_tokens_per_second=500)
    far = server("far", 0, 30, step_ms=10, prefill_tokens_per_second=5000)
    ways = {"near": 0.001, "far": 0.2}
    assert spans([near, far], 0, 30, round_trips=ways, use=SESSION)[0][0] == "near"
    assert spans([near, far], 0, 30, round_trips=ways, use=PASSES)[0][0] == "far"


def chains(records: list[ServerRecord], at: int, end: int) -> Iterator[list[Hop]]:
    """Every chain for blocks `[at, end)`."""
    if at == end:
        yield []
    for record in records:
        if record.start <= at < record.end:
            for stop in range(at + 1, record.end + 1):
                for rest in chains(records, stop, end):
                    yield [Hop(record, at, stop), *rest]


@pytest.mark.parametrize("pushes", [False, True])
def test_no_other_chain_is_cheaper_in_small_swarms(pushes: bool) -> None:
    rng = random.Random(11)
    swarms = 0
    while swarms < 60:
        blocks, count = rng.randint(1, 4), rng.randint(1, 5)
        names = [str(index) for index in range(count)]
        records = []
        for name in names:
            start = rng.randrange(blocks)
            others = rng.sample(names, rng.randrange(count))
            facts = {"step_ms": rng.random() * 30, "sessions": rng.randrange(3)}
            followers = [(other, rng.random() * 90) for other in others if other != name]
            records.append(server(name, start, rng.randint(start + 1, blocks), followers=followers, **facts))
        measured = {name: rng.choice([0.01, 0.03, 0.09, None]) for name in names if rng.random() < 0.8}
        ways = dict(zip(names, client_round_trips(records, measured), strict=True))
        totals = [
            estimate(chain, round_trips=ways, pushes=pushes).total + sum(entry_seconds(hop.record) for hop in chain)
            for chain in chains(records, 0, blocks)
        ]
        if not totals:
            continue
        swarms += 1
        chain = find_chain(records, 0, blocks, round_trips=measured, pushes=pushes)
        found = estimate(chain, round_trips=ways, pushes=pushes).total
        assert found + sum(entry_seconds(hop.record) for hop in chain) == pytest.approx(min(totals))


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


@pytest.mark.parametrize("pushes", [False, True])
def test_a_route_over_thousands_of_servers(pushes: bool) -> None:
    rng = random.Random(1)
    starts = [rng.randrange(126) for _ in range(3000)]
    ends = [min(126, start + rng.randint(1, 12)) for start in starts]
    holders = [
        [i for i, span in enumerate(zip(starts, ends, strict=True)) if span[0] <= b < span[1]] for b in range(127)
    ]
    records = [
        server(
            str(index),
            start,
            end,
            step_ms=rng.random() * 50,
            followers=[(str(rng.choice(holders[end])), rng.random() * 200) for _ in range(MOST_FOLLOWERS) if end < 126],
        )
        for index, (start, end) in enumerate(zip(starts, ends, strict=True))
    ]
    ways = {str(index): rng.random() / 5 for index in range(0, 3000, 2)}
    begun = time.process_time()
    chain = find_chain(records, 0, 126, round_trips=ways, pushes=pushes)
    print(f"{(time.process_time() - begun) * 1e3:.0f} ms")
    assert (chain[0].start, chain[-1].end) == (0, 126)
    assert all(leg.end == after.start for leg, after in pairwise(chain))


def test_the_ends_are_computed_by_trusted_peers_only_as_far_as_they_hold_them() -> None:
    records = [server("fast", 0, 30, step_ms=1), server("a", 0, 10, step_ms=90), server("b", 20, 30, step_ms=90)]
    assert spans(records, 0, 30) == [("fast", 0, 30)]
    guard = Guard({"a", "b"}, 30)
    for pushes in (False, True):
        chain = [("a", 0, 10), ("fast", 10, 20), ("b", 20, 30)]
        assert spans(records, 0, 30, pushes=pushes, guard=guard) == chain
        assert spans(records, 5, 25, pushes=pushes, guard=guard) == [("a", 5, 10), ("fast", 10, 20), ("b", 20, 25)]
        # between the ends anybody may compute, also what a trusted peer holds there
        middle = server("c", 14, 16, step_ms=90)
        assert spans([*records, middle], 0, 30, pushes=pushes, guard=Guard({"a", "b", "c"}, 30)) == chain
        # those of several that follow one another, whoever of them it is
        more = [server("c", 8, 14, step_ms=90), server("d", 0, 10, step_ms=80)]
        both = spans([*records, *more], 0, 30, pushes=pushes, guard=Guard({"a", "b", "c", "d"}, 30))
        assert [name for name, _, _ in both] == ["d", "c", "fast", "b"]
        assert both[1][2] == 14
    for peers, banned in (({"b"}, ()), ({"a"}, {"a"})):
        with pytest.raises(MissingBlocks, match=r"no trusted peer .* serves block 0") as caught:
            spans(records, 0, 30, guard=Guard(peers, 30), banned=banned)
        assert caught.value.blocks == ((0, 1),)
    with pytest.raises(MissingBlocks, match=r"no trusted peer .* serves block 29"):
        spans(records, 0, 30, guard=Guard({"a"}, 30))
