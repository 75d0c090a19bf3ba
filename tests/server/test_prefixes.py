"""A prefix that comes again is found in the cache, by the keys of its tokens, and by whom it belongs to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from raw_client import HIDDEN, Peer, Session, Whole, assert_nothing_left, service_of, serving

from lilliput import Server
from lilliput.wire.prefix import GRAIN, KEY_BYTES, prefix_keys

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture(autouse=True)
def _forgotten(server: Server) -> None:
    """No test finds what another left."""
    engine = service_of(server).engine
    engine.call(engine.pool.forget_prefixes).result(60)


class Text:
    """Tokens, their hidden states and keys."""

    def __init__(self, length: int, seed: int = 0, salt: bytes = b"model") -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(256, (length,), generator=generator).tolist()
        self.hidden = torch.randn(1, length, HIDDEN, generator=generator)
        self.keys = prefix_keys(self.tokens, salt=salt)
        self.key = b"".join(self.keys)

    def send(self, session: Session, start: int = 0, end: int | None = None) -> None:
        """Tokens `[start, end)` with the keys that they complete."""
        end = len(self.tokens) if end is None else end
        keys = self.keys[start // GRAIN : end // GRAIN]
        hidden = self.hidden[:, start:end]
        session.step(hidden, hashes=b"".join(keys))
        session.remember(hidden)


def again(peer: Peer, text: Text, cached: int, **fields: Any) -> Session:
    """A session that asks for a text's prefix, and finds so many tokens."""
    session = peer.session(prefix=text.key, **fields)
    assert session.info.cached_tokens == cached
    if cached:
        session.inputs = text.hidden[:, :cached]
    return session


def test_a_prefix_that_comes_again_is_not_computed_again(server: Server, peer: Peer) -> None:
    service, text = service_of(server), Text(100)
    first = again(peer, text, 0)
    text.send(first)
    first.go_on(5)
    first.bye()
    assert_nothing_left(server)
    assert service.engine.pool.kept == 3
    tokens, reused = service.engine.counters.tokens, service.engine.counters.reused_tokens
    second = again(peer, text, 96)
    text.send(second, 96)
    second.go_on()
    assert service.engine.counters.tokens - tokens == 5
    assert service.engine.counters.reused_tokens - reused == 96
    second.bye()


def test_another_peer_does_not_find_it(peer: Peer, stranger: Peer) -> None:
    text = Text(100)
    first = again(peer, text, 0)
    text.send(first)
    second = again(stranger, text, 0)
    first.bye()
    third = again(stranger, text, 0)
    second.bye()
    third.go_on(3)
    third.bye()


def test_another_peer_finds_it_where_peers_trust_each_other(tiny_llama: Path, whole: Whole) -> None:
    with serving(tiny_llama, share_prefixes=True) as server:
        peers = [Peer(server, whole) for _ in range(2)]
        text = Text(70)
        first = again(peers[0], text, 0)
        text.send(first)
        second = again(peers[1], text, 64)
        text.send(second, 64)
        for session in (first, second):
            session.go_on(3)
            session.bye()
        assert_nothing_left(server)
        for peer in peers:
            peer.stop()


def test_pages_of_a_shared_prefix_are_counted_once(server: Server, peer: Peer) -> None:
    pool, text = service_of(server).engine.pool, Text(100)
    sessions = [again(peer, text, 0)]
    text.send(sessions[0])
    assert pool.used == 4
    for count in range(1, 4):
        sessions.append(again(peer, text, 96))
        text.send(sessions[-1], 96)
        assert pool.used == 4 + count
    for session in sessions:
        session.go_on(2)
    for session in sessions:
        session.bye()


def test_who_goes_back_into_a_shared_page_gets_a_copy(server: Server, peer: Peer) -> None:
    pool, text = service_of(server).engine.pool, Text(100)
    first = again(peer, text, 0)
    text.send(first)
    second = again(peer, text, 96)
    second.go_on(3, start_position=40)
    assert pool.used == 4 + 1
    first.go_on(3)
    second.go_on(60)
    first.go_on(1, start_position=70)
    for session in (first, second):
        session.go_on()
    third = again(peer, text, 64)  # of the first one's pages, the third was written to
    third.go_on(4)
    for session in (first, second, third):
        session.bye()


def test_a_page_that_was_written_to_is_not_found_any_more(peer: Peer) -> None:
    text = Text(64)
    first = again(peer, text, 0)
    text.send(first)
    first.go_on(20, start_position=50)
    second = again(peer, text, 32)
    second.go_on(40)
    for session in (first, second):
        session.bye()
    third = again(peer, text, 32)
    third.go_on(2)
    third.bye()


def test_keys_may_come_in_several_steps(peer: Peer) -> None:
    text = Text(130)
    first = again(peer, text, 0)
    for start, end in ((0, 40), (40, 41), (41, 79), (79, 130)):
        text.send(first, start, end)
    first.bye()
    second = again(peer, text, 128)
    text.send(second, 128)
    second.go_on()
    second.bye()


def test_a_text_that_begins_alike_finds_what_it_shares(peer: Peer) -> None:
    text, longer = Text(96), Text(160)
    first = again(peer, text, 0)
    text.send(first)
    first.bye()
    other = Text(160, seed=1)
    longer.tokens = text.tokens[:70] + other.tokens[70:]
    longer.hidden = torch.cat([text.hidden[:, :70], other.hidden[:, 70:]], dim=1)
    longer.keys = prefix_keys(longer.tokens, salt=b"model")
    longer.key = b"".join(longer.keys)
    second = again(peer, longer, 64)
    longer.send(second, 64)
    second.go_on()
    second.bye()


def test_a_returning_session_publishes_what_it_adds(peer: Peer) -> None:
    """A chat: each turn finds all turns before it."""
    text = Text(200)
    cached = 0
    for turn in (70, 130, 200):
        session = again(peer, text, cached)
        text.send(session, cached, turn)
        session.go_on(3)
        session.bye()
        cached = turn // 32 * 32


@pytest.mark.parametrize("part", [(0, 3), (1, 6)])
def test_other_blocks_have_other_pages(peer: Peer, part: tuple[int, int]) -> None:
    text = Text(64)
    first = again(peer, text, 0)
    text.send(first)
    first.bye()
    second = peer.session(*part, prefix=text.key)
    assert second.info.cached_tokens == 0
    text.send(second)
    second.go_on()
    second.bye()
    third = peer.session(*part, prefix=text.key)
    assert third.info.cached_tokens == 64
    third.bye()


def test_another_salt_is_another_text(peer: Peer) -> None:
    text = Text(64)
    first = again(peer, text, 0)
    text.send(first)
    again(peer, Text(64, salt=b"adapter"), 0).bye()
    first.bye()


def test_several_rows(server: Server, peer: Peer) -> None:
    """As many tokens as all rows find."""
    service, short, long = service_of(server), Text(70), Text(110, seed=1)
    for text in (short, long):
        session = again(peer, text, 0)
        text.send(session)
        session.bye()
    keys = short.key[: 4 * KEY_BYTES] + long.key[: 4 * KEY_BYTES]
    session = peer.session(rows=2, prefix=keys)
    assert session.info.cached_tokens == 64
    session.inputs = torch.cat([short.hidden[:, :64], long.hidden[:, :64]])
    session.go_on(5)
    session.go_on(1, parents=[1, 1])
    assert service.engine.pool.used == 2 + 2  # two pages of the second row, shared, and a half-full one for each
    session.bye()
    session = peer.session(rows=2, prefix=Text(64, seed=9).key + long.key[: 4 * KEY_BYTES])
    assert session.info.cached_tokens == 0
    session.go_on(2, rows=2)
    session.bye()


def test_a_session_finds_no_more_than_it_may_hold(peer: Peer) -> None:
    text = Text(128)
    session = again(peer, text, 0)
    text.send(session)
    session.bye()
    session = again(peer, text, 64, max_length=96)  # at least one token must be left to compute
    session.go_on(32)
    session.bye()
    session = again(peer, text, 0, max_length=32)
    session.go_on(32)
    session.bye()


def test_one_whose_prompt_is_all_there_goes_back_by_a_token(peer: Peer) -> None:
    text = Text(64)
    session = again(peer, text, 0)
    text.send(session)
    session.bye()
    session = again(peer, text, 64)
    session.go_on(1, start_position=63)
    session.bye()
    session = again(peer, text, 32)  # that page was the only copy
    session.bye()


@pytest.mark.parametrize("keys", [3, 5])
def test_keys_that_do_not_fit_the_tokens_are_not_believed(peer: Peer, keys: int) -> None:
    text = Text(64)
    session = peer.session()
    session.step(text.hidden, hashes=(text.key + b"y" * KEY_BYTES)[: keys * KEY_BYTES])
    session.remember(text.hidden)
    session.go_on()
    session.bye()
    again(peer, text, 0).bye()


def test_kept_pages_make_room_for_those_who_need_it(server: Server, peer: Peer) -> None:
    text, pool = Text(200), service_of(server).engine.pool
    session = again(peer, text, 0)
    text.send(session)
    session.bye()
    assert_nothing_left(server)
    assert pool.kept == 6
    hog = peer.session(rows=pool.count, max_length=32)
    hog.go_on(2, rows=pool.count)
    hog.bye()
    assert pool.kept == 0
    session = again(peer, text, 0)
    session.go_on(3)
    session.bye()


def test_a_failed_step_leaves_no_prefix(peer: Peer) -> None:
    text = Text(64)
    session = peer.session()
    session.refused(torch.full((1, 64, HIDDEN), 3e38), prompts=torch.full((6, 1, 64, HIDDEN), 3e38), hashes=text.key)
    session.bye()
    again(peer, text, 0).bye()
