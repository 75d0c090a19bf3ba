"""Pages as reference counts, and pages that are found again."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from lilliput.engine.pages import PagePool


def test_a_page_is_free_when_its_last_user_leaves() -> None:
    pool = PagePool(2, 16)
    page = pool.take()
    pool.share(page)
    assert pool.is_shared(page)
    pool.leave(page)
    assert (pool.used, pool.is_shared(page)) == (1, False)
    pool.leave(page)
    assert pool.used == 0
    pool.check()


def test_a_known_page_is_kept_until_somebody_needs_the_room() -> None:
    pool = PagePool(3, 16)
    pages = [pool.take() for _ in range(3)]
    for page, key in zip(pages, (b"a", b"b", b"c"), strict=True):
        pool.know(page, key)
    for page in (pages[1], pages[0], pages[2]):
        pool.leave(page)
    assert (pool.used, pool.kept) == (0, 3)
    assert pool.find([b"a"]) == [pages[0]]
    pool.leave(pages[0])
    assert pool.take() == pages[1]  # the one that was left alone longest
    assert pool.find([b"b"]) == []
    assert pool.find([b"c", b"a", b"nothing", b"a"]) == [pages[2], pages[0]]
    assert pool.used == 3
    pool.check()


def test_a_page_that_is_written_to_is_known_no_more() -> None:
    pool = PagePool(1, 16)
    page = pool.take()
    pool.know(page, b"a")
    pool.about_to_write(page)
    assert pool.find([b"a"]) == []
    pool.leave(page)
    assert (pool.used, pool.kept) == (0, 0)


def test_the_first_page_known_for_a_key_stays_the_one() -> None:
    pool = PagePool(2, 16)
    first, second = pool.take(), pool.take()
    pool.know(first, b"a")
    pool.know(second, b"a")
    pool.know(first, b"b")
    pool.leave(second)
    assert pool.kept == 0
    assert pool.find([b"a"]) == [first]
    assert pool.find([b"b"]) == []
    pool.check()


def test_a_page_in_use_is_never_given_away() -> None:
    pool = PagePool(1, 16)
    pool.take()
    with pytest.raises(KeyError):
        pool.take()


class Life(RuleBasedStateMachine):
    """Against the plainest account: a counter of users, a dictionary of keys."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(6, 16)
        self.users: Counter[int] = Counter()
        self.keys: dict[bytes, int] = {}

    @property
    def in_use(self) -> list[int]:
        return sorted(page for page, users in self.users.items() if users)

    @precondition(lambda self: len(self.in_use) < 6)
    @rule()
    def take(self) -> None:
        page = self.pool.take()
        assert not self.users[page]
        self.users[page] = 1
        self.keys = {key: p for key, p in self.keys.items() if p != page}

    @precondition(lambda self: self.in_use)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(self.in_use))
        self.pool.share(page)
        self.users[page] += 1

    @precondition(lambda self: self.in_use)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(self.in_use))
        self.pool.leave(page)
        self.users[page] -= 1

    @precondition(lambda self: self.in_use)
    @rule(data=st.data(), key=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def know(self, data: st.DataObject, key: bytes) -> None:
        page = data.draw(st.sampled_from(self.in_use))
        self.pool.know(page, key)
        if key not in self.keys and page not in self.keys.values():
            self.keys[key] = page

    @precondition(lambda self: self.in_use)
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(self.in_use))
        if self.users[page] == 1:
            self.pool.about_to_write(page)
            self.keys = {key: p for key, p in self.keys.items() if p != page}

    @rule(keys=st.lists(st.sampled_from([b"a", b"b", b"c", b"d"]), max_size=4, unique=True))
    def find(self, keys: list[bytes]) -> None:
        expected = []
        for key in keys:
            if key not in self.keys:
                break
            expected.append(self.keys[key])
        assert self.pool.find(keys) == expected
        self.users.update(expected)

    @rule()
    def forget(self) -> None:
        self.pool.forget_prefixes()
        self.keys.clear()

    @invariant()
    def accounts_agree(self) -> None:
        self.pool.check()
        assert self.pool.used == len(self.in_use)
        assert self.pool.kept == len({page for page in self.keys.values() if not self.users[page]})
        assert all(self.pool.is_shared(page) == (users > 1) for page, users in self.users.items())


def test_any_order_of_taking_sharing_finding_and_leaving() -> None:
    run_state_machine_as_test(
        Life, settings=settings(max_examples=80, stateful_step_count=40, deadline=None, derandomize=True)
    )
