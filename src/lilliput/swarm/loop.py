"""An event loop in a thread, for callers that are not asynchronous."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from lilliput.errors import LilliputError

logger = logging.getLogger(__name__)
T = TypeVar("T")

_STOP_SECONDS = 5.0


try:
    import uvloop
except ImportError:
    _Fastest: type[asyncio.AbstractEventLoop] = asyncio.SelectorEventLoop
else:
    _Fastest = uvloop.Loop


class EventLoop(_Fastest):  # type: ignore[misc, valid-type]
    """A uvloop where there is one. Processes that it starts, which is the p2p daemon, get a session of their own.

    Ctrl-C goes to every process of the terminal's foreground group. The daemon would die of it, when its owner only
    stops an answer, or still has to say goodbye.
    """

    async def subprocess_exec(self, *args: Any, **options: Any) -> Any:
        return await super().subprocess_exec(*args, **{"start_new_session": True, **options})

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """As usual, but a stream whose other end was gone before hivemind had read who it is from is no error."""
        error, message = context.get("exception"), context.get("message", "")
        if "client_connected_cb" in message and isinstance(error, asyncio.IncompleteReadError | ConnectionError):
            logger.debug("a stream ended before it began: %s", error)
            return
        super().call_exception_handler(context)


def new_event_loop() -> asyncio.AbstractEventLoop:
    """An event loop for a `Node`."""
    return EventLoop()


def uninterrupted(wait: Callable[[float], object], seconds: float) -> None:
    """`wait(seconds)`, to its end whatever signals raise meanwhile; the first of that is raised afterwards.

    For what clears away: a second Ctrl-C would leave processes and files behind.
    """
    until, interruption = time.monotonic() + seconds, None
    while (left := until - time.monotonic()) > 0:
        try:
            wait(left)
            break
        except Exception:
            raise
        except BaseException as e:
            interruption = interruption or e
    if interruption is not None:
        raise interruption


class LoopThread:
    """One background thread with one event loop. It ends with `stop`, or before the interpreter does."""

    def __init__(self, name: str = "lilliput-loop") -> None:
        self._pid = os.getpid()
        self._closers: list[Callable[[], Awaitable[None]]] = []
        self._stopping = threading.Lock()
        self._stopped = False
        self.loop = new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            self.loop.close()

    def submit(self, coro: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine on the loop; does not wait."""
        if self._stopped or os.getpid() != self._pid:
            coro.close()
            raise LilliputError(
                "this connection to the swarm was closed"
                if os.getpid() == self._pid
                else "a connection to the swarm does not survive a fork: connect after forking, in the child"
            )
        return asyncio.run_coroutine_threadsafe(coro, self.loop)

    def run(self, coro: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run a coroutine on the loop and wait for its result.

        Whatever interrupts the wait (a timeout in seconds, KeyboardInterrupt) cancels the coroutine.
        """
        if threading.current_thread() is self._thread:
            coro.close()
            raise LilliputError("this call would wait for its own event loop; use the asynchronous form there")
        future = self.submit(coro)
        try:
            return future.result(timeout)
        except BaseException:
            future.cancel()
            raise

    def at_stop(self, closer: Callable[[], Awaitable[None]]) -> None:
        """Await `closer()` on the loop before the loop ends."""
        self._closers.append(closer)

    def stop(self) -> None:
        """Run the closers, cancel what still runs, end the thread. May be called twice, from any thread but its own."""
        with self._stopping:
            if self._stopped or os.getpid() != self._pid:
                return
            ending = asyncio.run_coroutine_threadsafe(self._wind_up(), self.loop)
            self._stopped = True
        atexit.unregister(self.stop)

        def end(within: float) -> None:
            with contextlib.suppress(Exception):
                ending.result(within)
            with contextlib.suppress(RuntimeError):  # it has ended already
                self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(within)

        uninterrupted(end, _STOP_SECONDS)

    async def _wind_up(self) -> None:
        for closer in reversed(self._closers):
            with contextlib.suppress(Exception):
                await closer()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.loop.shutdown_asyncgens()
