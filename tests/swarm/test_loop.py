"""The loop thread for synchronous callers."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from lilliput.errors import LilliputError
from lilliput.swarm.loop import LoopThread, uninterrupted


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    thread = LoopThread()
    yield thread
    thread.stop()


def test_it_runs_coroutines_and_hands_on_results_and_errors(loop: LoopThread) -> None:
    async def double(x: int) -> int:
        await asyncio.sleep(0)
        if x < 0:
            raise ValueError("negative")
        return 2 * x

    assert loop.run(double(4)) == 8
    with pytest.raises(ValueError, match="negative"):
        loop.run(double(-1))


@pytest.mark.parametrize("how", ["timeout", "interrupt"])
def test_whoever_stops_waiting_cancels_the_coroutine(loop: LoopThread, how: str) -> None:
    ended = threading.Event()

    async def forever() -> None:
        try:
            await asyncio.sleep(100)
        finally:
            ended.set()

    if how == "timeout":
        with pytest.raises(TimeoutError):
            loop.run(forever(), timeout=0.05)
    else:
        threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            loop.run(forever())
    assert ended.wait(2)
    assert loop.run(asyncio.sleep(0, "still there")) == "still there"


def test_stopping_runs_the_closers_and_cancels_the_rest(loop: LoopThread) -> None:
    events: list[str] = []

    async def closer() -> None:
        events.append("closed")

    async def forever() -> None:
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            events.append("cancelled")
            raise

    loop.at_stop(closer)
    loop.submit(forever())
    loop.run(asyncio.sleep(0))
    loop.stop()
    loop.stop()
    assert events == ["closed", "cancelled"]
    with pytest.raises(LilliputError, match="was closed"):
        loop.run(asyncio.sleep(0))


def test_calling_it_from_its_own_loop_is_an_error_not_a_deadlock(loop: LoopThread) -> None:
    async def nested() -> None:
        loop.run(asyncio.sleep(0))

    with pytest.raises(LilliputError, match="own event loop"):
        loop.run(nested(), timeout=5)


def test_a_forked_child_gets_a_clear_error(loop: LoopThread) -> None:
    loop.run(asyncio.sleep(0))
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            loop.run(asyncio.sleep(0), timeout=5)
        except LilliputError as e:
            code = 0 if "fork" in str(e) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_the_interpreter_ends_quietly_with_a_loop_running() -> None:
    program = (
        "import asyncio\n"
        "from lilliput.swarm.loop import LoopThread\n"
        "loop = LoopThread()\n"
        "async def closer(): print('closed')\n"
        "loop.at_stop(closer)\n"
        "loop.submit(asyncio.sleep(100))\n"
    )
    begin = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (0, "closed\n", "")
    assert time.monotonic() - begin < 20


def test_what_clears_away_goes_on_when_it_is_interrupted() -> None:
    """And the first interruption counts, when it is done."""
    interruptions = [KeyboardInterrupt(), SystemExit(143)]

    def wait(seconds: float) -> None:
        assert 0 < seconds <= 60
        if interruptions:
            raise interruptions.pop(0)

    with pytest.raises(KeyboardInterrupt):
        uninterrupted(wait, 60.0)
    assert not interruptions


def test_a_stream_that_ends_before_it_begins_is_no_error_and_other_failures_are(
    loop: LoopThread, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def connect(serve: Callable[[asyncio.StreamReader], Awaitable[object]]) -> None:
        failed = asyncio.Event()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await serve(reader)
            finally:
                writer.close()
                asyncio.get_running_loop().call_later(0.05, failed.set)  # after it was reported

        path = tmp_path / "socket"
        async with await asyncio.start_unix_server(accept, path):
            _, writer = await asyncio.open_unix_connection(path)
            writer.close()
            await failed.wait()

    async def wrong(reader: asyncio.StreamReader) -> None:
        raise ValueError("wrong")

    loop.run(connect(lambda reader: reader.readexactly(1)))
    assert not caplog.records
    loop.run(connect(wrong))
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ValueError]
