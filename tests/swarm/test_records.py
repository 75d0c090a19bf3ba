"""Records survive what the DHT hands out."""

from __future__ import annotations

import json

import pytest

from lilliput.swarm.records import MAX_RECORD_BYTES, ServerRecord

RECORD = ServerRecord(
    peer_id="12D3KooWpeer",
    model="some/model",
    fingerprint="abc",
    model_blocks=30,
    start=0,
    end=10,
    state="draining",
    dtype="bfloat16",
    max_length=2048,
    cache_tokens=8192,
    cache_tokens_free=4096,
    tokens_per_second=25.5,
    adapters=("one", "two"),
    addresses=("/ip4/127.0.0.1/tcp/1",),
)


def test_a_record_comes_back_as_it_was() -> None:
    assert ServerRecord.from_bytes(RECORD.to_bytes()) == RECORD


def test_what_is_at_its_default_takes_no_room() -> None:
    assert len(ServerRecord(peer_id="p", model="m", start=0, end=1).to_bytes()) < 60


def test_fields_of_a_newer_version_are_ignored() -> None:
    data = json.loads(RECORD.to_bytes()) | {"colour": "green", "nested": {"a": [1]}}
    assert ServerRecord.from_bytes(json.dumps(data).encode()) == RECORD


def test_a_record_of_an_older_version_has_no_name() -> None:
    data = json.loads(RECORD.model_copy(update={"name": "attic"}).to_bytes())
    assert ServerRecord.from_bytes(json.dumps(data).encode()) == RECORD.model_copy(update={"name": "attic"})
    del data["name"]
    assert ServerRecord.from_bytes(json.dumps(data).encode()) == RECORD


def test_what_a_terminal_would_obey_is_left_out() -> None:
    data = json.loads(RECORD.to_bytes()) | {"name": "my\x1b[2J \u202eattic\n", "version": "\x07" + "1"}
    record = ServerRecord.from_bytes(json.dumps(data).encode())
    assert record is not None
    assert (record.name, record.version) == ("my[2J attic", "1")


@pytest.mark.parametrize(
    "garbage",
    [
        None,
        7,
        "text",
        {"a": 1},
        b"",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b"null",
        b'{"peer_id":"p","model":"m","start":5,"end":5}',
        b'{"peer_id":"p","model":"m","start":-1,"end":5}',
        b'{"peer_id":"p","model":"m","start":0,"end":9,"model_blocks":8}',
        b'{"peer_id":"p","model":"m","start":0,"end":9,"tokens_per_second":NaN}',
        b'{"peer_id":"p","model":"m","start":0,"end":9,"state":"asleep"}',
        b'{"peer_id":"p","model":"m","start":0,"end":9,"adapters":["' + b"x" * MAX_RECORD_BYTES + b'"]}',
    ],
)
def test_garbage_is_no_record_and_no_error(garbage: object) -> None:
    assert ServerRecord.from_bytes(garbage) is None
