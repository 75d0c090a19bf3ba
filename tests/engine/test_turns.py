"""Servers of one machine compute one after the other, and none can stop another by holding on."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import pairwise

import pytest

from lilliput.engine import turns
from lilliput.engine.turns import Turn

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="no names in the abstract socket namespace")


@pytest.fixture(autouse=True)
def names_of_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other servers may compute on this machine meanwhile."""
    make = turns.Turn.__init__

    def init(self: Turn) -> None:
        make(self)
        self._queue, self._turn = "\0lilliput-test-queue", "\0lilliput-test-turn"

    monkeypatch.setattr(turns.Turn, "__init__", init)


@pytest.fixture
def holder() -> Iterator[subprocess.Popen[bytes]]:
    """A process that holds the turn and never gives it back."""
    code = "import socket, sys; s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); s.bind('\\0lilliput-test-turn')"
    process = subprocess.Popen(
        [sys.executable, "-c", f"{code}; print(flush=True); sys.stdin.read()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout
    assert process.stdin
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


def test_no_two_have_the_turn_and_both_get_it() -> None:
    inside, most, rounds = 0, 0, []
    lock = threading.Lock()

    def compute(turn: Turn, name: str) -> None:
        nonlocal inside, most
        for _ in range(20):
            with turn:
                with lock:
                    inside += 1
                    most = max(most, inside)
                    rounds.append(name)
                time.sleep(0.002)
                with lock:
                    inside -= 1

    threads = [threading.Thread(target=compute, args=(Turn(), name)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    # whoever gives it back does not take it again while another waits
    assert sum(a != b for a, b in pairwise(rounds)) > 10


def test_a_killed_holder_leaves_the_turn_free(holder: subprocess.Popen[bytes]) -> None:
    turn = Turn()
    threading.Timer(0.1, holder.kill).start()
    with turn:
        assert turn._held
    assert not turn._not_before


def test_one_that_never_gives_it_back_is_waited_for_once(
    holder: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "_PATIENCE_SECONDS", 0.05)
    turn = Turn()
    with turn:  # after the wait it computes all the same
        assert not turn._held
    monkeypatch.setattr(turns, "_bind", lambda *_: pytest.fail("it waits again"))
    for _ in range(3):
        with turn:
            assert not turn._held


def test_an_error_inside_gives_the_turn_back() -> None:
    turn, other = Turn(), Turn()
    with pytest.raises(ZeroDivisionError), turn:
        1 / 0  # noqa: B018
    with other:
        assert other._held
