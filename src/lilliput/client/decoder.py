"""Many conversations in one process: their steps travel side by side, and the model's ends compute for all at once.

`generate()` is a loop for one batch that begins and ends together. Here every stream begins and ends when it likes, on
the connection's event loop; the head, which is as large as several blocks, is read once for all streams whose hidden
states have come back. This is what a gateway needs, and what `lilliput bench` measures for many streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from lilliput.client.async_session import AsyncInferenceSession
from lilliput.client.remote import RemoteModel
from lilliput.errors import BadRequest

T = TypeVar("T")

#: picks the next token's id from the ids so far and the logits, float32 [vocabulary], which it may overwrite
Sampler = Callable[[Sequence[int], torch.Tensor], int]
#: looks at logits, float32 [n, vocabulary], after the tokens of a prompt from the named place on; runs in a thread
Reader = Callable[[int, torch.Tensor], None]

_CYCLE_WEIGHT = 0.2
#: a prompt's logits are made and read in parts of so many: those of a long one, all at once, would take gigabytes
_LOGITS_AT_ONCE = 1 << 22


@dataclass(eq=False)
class _Due:
    """A stream whose last token's hidden states, [1, 1, hidden], have come back."""

    hidden: torch.Tensor
    ids: list[int]
    sampler: Sampler | None
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[tuple[int, torch.Tensor]]
    arrived: float
    #: when the model's ends began to compute, and were done (the time is `time.monotonic`'s)
    begun: float = 0.0
    done: float = 0.0


@dataclass(frozen=True)
class EndsTime:
    """What the model's ends took of a token, here, in seconds.

    :ivar embedding: the prompt; of a token it is computed with the one before
    :ivar waiting: for streams that go on together with this one, or for the thread that computes
    :ivar computing: the head and the choice, for all that go on together; with the first, the head over the prompt if
        that is read, too
    """

    embedding: float
    waiting: float
    computing: float


def seconds_to_wait(arrived: float, flying: Collection[float], *, cycle: float, stages: int, now: float) -> float:
    """How long a stream whose hidden states are here should wait for others, so that they go on together; 0: go.

    Streams that travel closer together than one stage of their way (a server, or this client) get into each other's way
    at every stage; together they take hardly longer than alone. Those that are further apart keep different machines
    busy, and stay apart.

    :param arrived: when the first of those that wait came back
    :param flying: when each of those that are under way left
    :param cycle: how long they usually take
    :param stages: servers of the chain, and one
    """
    until = arrived + cycle / stages
    if now >= until or not any(left + cycle <= until for left in flying):
        return 0.0
    return until - now


class Decoder:
    """Generates for many streams with one model's ends.

    :param model: from `AutoDistributedModelForCausalLM.from_pretrained`. Other threads may use it meanwhile.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._due: list[_Due] = []
        #: when the last token of each stream that is under way left
        self._flying: dict[int, float] = {}
        self._cycle, self._stages = 0.0, 2
        self._arrived = threading.Condition()
        self._closed = False
        self._reading = asyncio.Lock()
        self._thread = threading.Thread(target=self._run, name="decoder", daemon=True)
        self._thread.start()

    @property
    def remote(self) -> RemoteModel:
        """Where the model's blocks are: for sessions to give to `stream`."""
        return self._model._remote_model  # type: ignore[no-any-return]

    def close(self) -> None:
        """End the thread. Streams must have ended."""
        with self._arrived:
            self._closed = True
            self._arrived.notify()
        self._thread.join()

    def run(self, coro: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the connection's loop and wait for it."""
        return self._model._shared.run(coro)  # type: ignore[no-any-return]

    async def stream(
        self,
        input_ids: Sequence[int],
        *,
        max_new_tokens: int,
        sampler: Sampler | None = None,
        reader: Reader | None = None,
        stop_ids: Collection[int] = (),
        session: AsyncInferenceSession | None = None,
        bid: float = 0.0,
        on_ends: Callable[[EndsTime], None] | None = None,
    ) -> AsyncIterator[int]:
        """The answer's tokens, one after another, `stop_ids` not among them. Runs on the connection's loop.

        :param input_ids: the prompt
        :param max_new_tokens: 0 computes the prompt, and nothing after it
        :param sampler: how to pick a token; default: the likeliest
        :param reader: is shown, part by part and before the first token comes, what the model expects after each token
            of the prompt but the last. All of the prompt is computed for it, also what servers have in their caches.
        :param session: one that stands before the first of `input_ids`; by default one for this stream, closed with it
        :param on_ends: told with each token, `stop_ids` among them, what it took here; once, if no token is wanted
        """
        if not input_ids:
            raise BadRequest("an empty prompt; begin with the model's first token")
        own = session is None
        if session is None:
            session = AsyncInferenceSession(self.remote, max_length=len(input_ids) + max_new_tokens, bid=bid)
        key = id(session)
        try:
            ids = list(input_ids)
            tokens = torch.tensor([ids])
            begun = time.monotonic()
            hidden = await asyncio.to_thread(self._embed, tokens)
            embedding = time.monotonic() - begun
            hidden = await session.step(hidden, tokens=tokens, needed=1 if reader is None else None)
            begun = time.monotonic()
            if reader is not None:
                await self._read(hidden, reader)
            reading = time.monotonic() - begun
            if not max_new_tokens and on_ends is not None:
                on_ends(EndsTime(embedding, 0.0, reading))
            self._stages = len(session.hops) + 1
            for number in range(max_new_tokens):
                due = self._next(key, hidden[:, -1:], ids, sampler)
                token, embedded = await due.future
                if on_ends is not None:
                    on_ends(EndsTime(embedding, due.begun - due.arrived, due.done - due.begun + reading))
                embedding = reading = 0.0
                if token in stop_ids:
                    return
                ids.append(token)
                yield token
                if number + 1 < max_new_tokens:
                    self._flying[key] = time.monotonic()
                    hidden = await session.step(embedded, tokens=torch.tensor([[token]]), needed=1)
        finally:
            self._flying.pop(key, None)
            if own:
                await session.close()

    async def _read(self, hidden: torch.Tensor, reader: Reader) -> None:
        end, vocabulary = hidden.shape[1] - 1, self._model.config.get_text_config().vocab_size
        count = max(1, _LOGITS_AT_ONCE // vocabulary)
        for place in range(0, end, count):
            async with self._reading:  # one part of one prompt at a time, in turn
                await asyncio.to_thread(self._read_part, place, hidden[:, place : min(place + count, end)], reader)

    @torch.inference_mode()
    def _read_part(self, place: int, hidden: torch.Tensor, reader: Reader) -> None:
        reader(place, self._logits(hidden)[0].float())

    def _next(self, key: int, hidden: torch.Tensor, ids: list[int], sampler: Sampler | None) -> _Due:
        loop, now = asyncio.get_running_loop(), time.monotonic()
        due = _Due(hidden, ids, sampler, loop, loop.create_future(), now)
        with self._arrived:
            if (left := self._flying.pop(key, None)) is not None:
                self._cycle += (now - left - self._cycle) * (_CYCLE_WEIGHT if self._cycle else 1.0)
            self._due.append(due)
            self._arrived.notify()
        return due

    # ---- the decoder's thread ----

    def _run(self) -> None:
        while True:
            with self._arrived:
                while not self._due and not self._closed:
                    self._arrived.wait()
                if self._closed and not self._due:
                    return
                while seconds := seconds_to_wait(
                    self._due[0].arrived,
                    list(self._flying.values()),
                    cycle=self._cycle,
                    stages=self._stages,
                    now=time.monotonic(),
                ):
                    self._arrived.wait(seconds)
                wave, self._due = [due for due in self._due if not due.future.done()], []
            if not wave:  # nobody waits any more
                continue
            begun = time.monotonic()
            try:
                results = self._compute(wave)
            except Exception as e:
                results = [e] * len(wave)
            done = time.monotonic()
            for due in wave:
                due.begun, due.done = begun, done
            for loop in {due.loop for due in wave}:
                mine = [(due.future, result) for due, result in zip(wave, results, strict=True) if due.loop is loop]
                loop.call_soon_threadsafe(_resolve, mine)

    @torch.inference_mode()
    def _compute(self, wave: list[_Due]) -> list[tuple[int, torch.Tensor] | Exception]:
        logits = self._logits(torch.cat([due.hidden for due in wave]))[:, -1]
        tokens = logits.argmax(-1)
        failed: dict[int, Exception] = {}  # one stream's sampler is no concern of the others
        with _one_thread():
            for row, due in enumerate(wave):
                if due.sampler is not None:
                    try:
                        tokens[row] = due.sampler(due.ids, logits[row].float())
                    except Exception as e:
                        failed[row] = e
        embedded = self._embed(tokens[:, None]).split(1)
        return [failed.get(row) or result for row, result in enumerate(zip(tokens.tolist(), embedded, strict=True))]

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """What came from the last block, [rows, tokens, hidden] -> [rows, tokens, vocabulary]."""
        with self._model._gate.answering(lambda _: hidden):
            return self._model(inputs_embeds=hidden, use_cache=False).logits  # type: ignore[no-any-return]

    @torch.inference_mode()
    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """int64 [rows, tokens] -> what the model sends to its first block, [rows, tokens, hidden]."""
        seen: list[torch.Tensor] = []

        def look(hidden: torch.Tensor) -> torch.Tensor:
            seen.append(hidden)
            return hidden

        with self._model._gate.answering(look):
            self._model.base_model(input_ids=tokens, use_cache=False)
        return seen[0]


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """For small operations. Threads that share one wait for each other at its end, for milliseconds if the cores have
    other work: several times as long as one thread takes for all of it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _resolve(results: list[tuple[asyncio.Future[Any], Any]]) -> None:
    for future, result in results:
        if future.done():
            continue
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)
