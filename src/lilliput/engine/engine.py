"""The engine: one thread that owns the device, the pages and the sessions' caches.

    while running:
        take what arrived -> plan a round -> pack -> through the blocks -> hand out the results
        (and between rounds, a unit of a training pass)

Everything else submits work and is called back. No lock guards the caches: only this thread touches them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch

from lilliput.engine.counters import Counters
from lilliput.engine.fairness import PeerTurns
from lilliput.engine.packing import Slice, attend_to_self, looks_ahead, pack, unpack
from lilliput.engine.pages import PagePool
from lilliput.engine.passes import Passes
from lilliput.engine.rates import Rates
from lilliput.engine.scheduler import Budget, plan_round, worth_waiting
from lilliput.engine.session import CacheSession, Step, StepOutput
from lilliput.engine.step_queue import StepQueue
from lilliput.engine.threads import Threads
from lilliput.engine.training import Pass
from lilliput.engine.turns import Turn
from lilliput.errors import BadRequest, LilliputError, ServerFailure, SessionExpired
from lilliput.models.span import Span

logger = logging.getLogger(__name__)
T = TypeVar("T")

_ALONE: AbstractContextManager[None] = nullcontext()
_SHUTTING_DOWN = SessionExpired("the server computes no more")


class Engine:
    """Runs a span for many sessions.

    :param pages, page_size: the cache has room for so many times so many tokens in all blocks of the span, or for more
        where some of these look at a window only: each of `span.groups` has pages of its own, from one pool
    :param take_turns: compute while no other server of this machine does
    """

    def __init__(
        self, span: Span, *, pages: int, page_size: int = 32, budget: Budget | None = None, take_turns: bool = False
    ) -> None:
        self.span, self.pages = span, pages
        self.budget = budget or Budget()
        self.pool = PagePool(pages * len(span.groups), page_size)
        self.counters = Counters()
        self.rates = Rates()
        self.threads = Threads()
        #: among the servers of this machine, if they all use all of its cores
        self.turn: AbstractContextManager[None] = Turn() if take_turns else nullcontext()
        self.cache = span.new_cache(self.pool.count, page_size)
        self._sessions: dict[CacheSession, StepQueue] = {}
        self._passes = Passes(span, self.counters, self._cores)
        self._round_seconds = 0.0
        self._turns = PeerTurns()
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = self._stopped = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop after the round in progress. Steps that wait get an error."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.ident is not None:
            self._thread.join()

    @property
    def failed(self) -> bool:
        """It has ended without having been told to."""
        return self._stopped and not self._stopping

    # ---- called from any thread ----

    def open(
        self,
        start: int,
        end: int,
        *,
        rows: int,
        max_length: int,
        bid: float = 0.0,
        owner: bytes = b"",
        adapter: str = "",
        peer: str = "",
        prefix: list[list[bytes]] | None = None,
    ) -> Future[CacheSession]:
        """A session of `peer` for blocks `[start, end)`, its length already that of the prefix found in kept pages."""

        def make() -> CacheSession:
            session = CacheSession(
                self.pool,
                start,
                end,
                self.span.groups_of(start, end),
                rows=rows,
                max_length=max_length,
                bid=bid,
                owner=owner,
                adapter=adapter,
                peer=peer,
            )
            if prefix:
                self.counters.reused_tokens += session.adopt_prefix(prefix) * len(prefix)
            self._sessions[session] = StepQueue()
            return session

        return self.call(make)

    def submit(self, session: CacheSession, step: Step) -> None:
        """Queue a step; `step.done` is called with its result. A session's steps run in the order of submission."""
        self.submit_all([(session, step)])

    def submit_all(self, steps: Sequence[tuple[CacheSession, Step]]) -> None:
        """Queue steps that arrived together, so that they run together."""

        def add() -> None:
            for session, step in steps:
                self._add(session, step)

        self._post(add)

    def close(self, session: CacheSession) -> Future[None]:
        """Free a session's pages. Its waiting steps get an error."""

        def end() -> None:
            queue = self._sessions.pop(session, None)
            session.close()
            for step in queue.steps if queue else ():
                step.done(SessionExpired("the session was closed before this step was computed"))

        return self.call(end)

    def extend(self, session: CacheSession, max_length: int) -> Future[None]:
        """Let a session grow longer. Admission must have promised the room."""

        def grow() -> None:
            session.max_length = max(session.max_length, max_length)

        return self.call(grow)

    def run_pass(self, job: Pass) -> None:
        """Queue a forward or backward pass; `job.done` is called with its result."""

        def add() -> None:
            if self._stopped:
                job.done(_SHUTTING_DOWN)
            else:
                self._passes.add(job)

        self._post(add)

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run a function between rounds, on the engine's thread."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except BaseException as e:
                future.set_exception(e)

        self._post(run)
        return future

    def _post(self, action: Callable[[], None]) -> None:
        with self._wake:
            if not self._stopped:
                self._inbox.append(action)
                self._wake.notify()
                return
        self._act(action)  # nobody else will; it finds no sessions, and says so

    # ---- the engine's thread ----

    def _add(self, session: CacheSession, step: Step) -> None:
        if session.closed or session not in self._sessions:
            step.done(SessionExpired("the session is closed"))
            return
        if step.step_id and session.last_step and session.last_step[0] == step.step_id:
            step.done(session.last_step[1])  # asked again: answered from memory
            return
        if step.step_id and step.step_id in session.past_steps:
            step.done(BadRequest(f"step {step.step_id} was computed before, and its output is not kept any more"))
            return
        self._sessions[session].add(step)

    def _run(self) -> None:
        try:
            with self.span.on_device():
                self._work()
        except Exception:  # whoever waits, or comes later, is told rather than left waiting
            logger.critical("the engine has failed, and computes no more", exc_info=True)
        finally:
            self._give_up()

    def _work(self) -> None:
        while True:
            with self._wake:
                while not (self._inbox or self._stopping or self._has_work()):
                    self._wake.wait()
            while self._inbox:  # all that has arrived by now, also meanwhile, may share the next round
                self._act(self._inbox.popleft())
            if self._stopping:
                break
            self._begin_steps()
            if self._hold_back():
                continue
            trained = self._passes.train()
            if not self._round() and not trained and self._passes:
                self._passes.go_on()

    def _has_work(self) -> bool:
        return bool(self._passes) or any(queue.steps for queue in self._sessions.values())

    def _begin_steps(self) -> None:
        """Check the first step of every session and give it its pages."""
        for session, queue in self._sessions.items():
            while queue.steps and not queue.steps[0].begun:
                step = queue.steps[0]
                try:
                    step.to(self.span.device)
                    session.begin(step, self.span.hidden_size, self.span.dtype)
                    if step.mask is not None:
                        step.whole = looks_ahead(step.mask, session.length)
                        step.mask = attend_to_self(step.mask, session.length)
                    self._prepare_pages(session)
                except LilliputError as e:
                    queue.steps.popleft()
                    step.done(e)
                except Exception as e:  # the thread must live: others' sessions hang on it
                    logger.exception("a step could not begin")
                    self._fail(session, step, e)

    def _prepare_pages(self, session: CacheSession) -> None:
        if session.copies:
            self.cache.copy(session.copies)
            session.copies.clear()
        if session.fresh:
            self.cache.clear(session.fresh)
            session.fresh.clear()

    def _hold_back(self) -> bool:
        """Wait a moment for sessions that are about to bring their next token. True: look again."""
        now = time.perf_counter()
        first = float("inf")
        for queue in self._sessions.values():
            if queue.steps:
                step = queue.steps[0]
                if step.tokens > 1:
                    return False  # a prefix fills the device anyway
                first = min(first, step.arrived)
        if first == float("inf") or not self._round_seconds:
            return False
        absent = [away for queue in self._sessions.values() if (away := queue.absent(now)) is not None]
        seconds = worth_waiting(absent, now=now, first_arrived=first, round_seconds=self._round_seconds)
        if not seconds:
            return False
        with self._wake:
            if not self._inbox:
                self._wake.wait(seconds)
        return True

    def _round(self) -> bool:
        """One pass over the weights. False if nothing waited."""
        heads = [(session, queue.steps[0]) for session, queue in self._sessions.items() if queue.steps]
        waiting = [self._turns.waiting(session, step) for session, step in heads]
        plan = plan_round(waiting, self.budget)
        if not plan:
            return False
        self._turns.count(waiting, plan)
        self._compute([Slice(*heads[index], tokens) for index, tokens in plan.items()])
        return True

    def _compute(self, slices: list[Slice]) -> None:
        begun = time.perf_counter()
        for s in slices:
            s.step.started = s.step.started or begun
        try:
            hidden, batch, ordered = pack(slices, self.pool.page_size, self.span.dtype)
            first = ordered[0].session
            with self._cores(hidden.shape[0]):
                begun = time.perf_counter()
                outputs = self.span.paged(hidden, batch, self.cache.blocks, first.start, first.end).cpu()
        except Exception as e:
            if len(slices) > 1:  # one of them broke it; the others need not suffer
                for s in slices:
                    self._compute([s])
                return
            logger.exception("a step failed")
            self._fail(slices[0].session, slices[0].step, e)
            return
        took = time.perf_counter() - begun
        self._count(ordered, took)
        finite = bool(torch.isfinite(outputs.sum(dtype=torch.float32)))
        for s, output in zip(ordered, unpack(outputs, ordered), strict=True):
            if finite or bool(torch.isfinite(output).all()):
                self._advance(s, output, took)
            else:
                self._fail(s.session, s.step, ValueError("its outputs are not finite numbers"))
        self._passes.credit_round(took)

    def _cores(self, tokens: int) -> AbstractContextManager[None]:
        """For a round of so many tokens: the threads that suit it, and our turn to use them."""
        shares = self.threads.use_for(tokens) == 1 and not self.threads.measuring
        return _ALONE if shares else self.turn

    def _advance(self, s: Slice, output: torch.Tensor, took: float) -> None:
        session, step = s.session, s.step
        step.outputs.append(output)
        step.offset += s.tokens
        step.compute_seconds += took
        session.length += s.tokens
        session.computed_tokens += s.count
        if step.offset < step.tokens:
            return
        session.finish(step)
        queue = self._sessions[session]
        queue.steps.popleft()
        queue.left = time.perf_counter()
        hidden = step.outputs[0] if len(step.outputs) == 1 else torch.cat(step.outputs, dim=1)
        result = StepOutput(
            hidden=hidden,
            length=session.length,
            queued_seconds=step.started - step.arrived,
            compute_seconds=step.compute_seconds,
            computed_tokens=step.rows * step.tokens,
        )
        session.remember(step, result)
        self.counters.steps += 1
        self.counters.queued.saw(result.queued_seconds)
        self.counters.computing.saw(result.compute_seconds)
        step.done(result)

    def _count(self, ordered: list[Slice], took: float) -> None:
        decode = sum(s.count for s in ordered if s.tokens == 1)
        total = sum(s.count for s in ordered)
        self.counters.rounds += 1
        self.counters.tokens += total
        self.counters.batches.saw(sum(s.step.rows for s in ordered))
        self.counters.largest_decode_batch = max(self.counters.largest_decode_batch, decode)
        if decode == total:
            self._round_seconds = took
            self.rates.saw_decode(decode, took)
        else:
            self.rates.saw_prefill(total, took)

    def _fail(self, session: CacheSession, step: Step, error: Exception) -> None:
        """A step broke: it gets an error, its session goes on without it."""
        self.counters.failures += 1
        self._sessions[session].steps.popleft()
        if step.begun:
            # NaN behind the last token would meet weights of zero in the next step, and zero times NaN is NaN
            first = (session.length - step.offset) % self.pool.page_size
            for page, group in session.abandon(step):
                self.cache.clear_behind(page, first, group)
        step.done(ServerFailure(f"the server failed to compute this step: {error}"))

    def _give_up(self) -> None:
        error = _SHUTTING_DOWN
        for session, queue in self._sessions.items():
            session.close()
            for step in queue.steps:
                step.done(error)
        self._sessions.clear()
        self._passes.end(error)
        with self._wake:
            self._stopped = True
            actions, self._inbox = self._inbox, deque()
        for action in actions:
            self._act(action)

    @staticmethod
    def _act(action: Callable[[], None]) -> None:
        try:
            action()
        except Exception:  # the thread must live: others' sessions hang on it
            logger.exception("an action of the engine failed")
