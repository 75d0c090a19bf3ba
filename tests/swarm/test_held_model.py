"""Who holds what, as seen from the records."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

import pytest

from lilliput.swarm.held_model import HeldModel
from lilliput.swarm.records import ServerRecord


def server(start: int, end: int, state: str = "serving", **more: object) -> ServerRecord:
    return ServerRecord.model_validate(
        {"peer_id": f"{start}-{end}", "model": "m", "start": start, "end": end, "state": state, **more}
    )


@pytest.mark.parametrize(
    ("servers", "missing"),
    [
        ([], [(0, 12)]),
        ([server(0, 12)], []),
        ([server(0, 5), server(3, 8)], [(8, 12)]),
        ([server(2, 4), server(6, 7)], [(0, 2), (4, 6), (7, 12)]),
        ([server(0, 6), server(6, 12, "joining")], [(6, 12)]),
        ([server(0, 6), server(0, 12, "draining")], [(6, 12)]),
        ([server(0, 20)], []),
        ([server(0, 6), server(14, 20)], [(6, 12)]),
    ],
)
def test_what_is_missing(servers: list[ServerRecord], missing: list[tuple[int, int]]) -> None:
    assert HeldModel("m", 12, servers).missing() == missing


def test_who_has_failed_or_holds_other_files_does_not_count() -> None:
    servers = [server(0, 6, fingerprint="a"), server(6, 9, fingerprint="b"), server(9, 12, fingerprint="a")]
    held = HeldModel("m", 12, servers, fingerprint="a", failed={"9-12"})
    assert held.missing() == [(6, 12)]
    assert [(s["serves"], s["other_files"], s["failed"]) for s in held.facts()["servers"]] == [
        (True, False, False),
        (False, True, False),
        (False, False, True),
    ]
    assert HeldModel("m", 12, servers).missing() == []  # where nobody knows the right files


def test_ways_are_told_apart_from_silence() -> None:
    servers = [server(0, 4), server(4, 8), server(8, 12)]
    facts = HeldModel("m", 12, servers, {"0-4": 0.0012345, "4-8": None}).facts()["servers"]
    assert [(s["round_trip_ms"], s["silent"]) for s in facts] == [(1.23, False), (None, True), (None, False)]


def test_the_number_of_blocks_is_what_most_servers_say() -> None:
    servers = [server(0, 4, model_blocks=30), server(4, 8, model_blocks=30), server(0, 9, model_blocks=10)]
    assert HeldModel.announced("m", servers, 7, {}).blocks == 30
    assert HeldModel.announced("m", [], 7, {}).missing() == [(0, 7)]


def naive(servers: Sequence[ServerRecord], blocks: int) -> list[int]:
    return [sum(s.state == "serving" and s.start <= block < s.end for s in servers) for block in range(blocks)]


def test_hundreds_of_servers() -> None:
    chance = random.Random(0)
    spans = [(start, start + chance.randrange(1, 15)) for start in (chance.randrange(112) for _ in range(400))]
    servers = [server(*span, state=chance.choice(["serving", "serving", "joining", "draining"])) for span in spans]
    held = HeldModel("m", 126, servers)
    facts = json.loads(json.dumps(held.facts()))
    assert facts["coverage"] == naive(servers, 126)
    missing = {block for start, end in facts["missing"] for block in range(start, end)}
    assert missing == {block for block, count in enumerate(facts["coverage"]) if not count}
    assert len(facts["servers"]) == 400
