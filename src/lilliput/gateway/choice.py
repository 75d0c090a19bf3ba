"""One answer to a prompt, while it comes; and several at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from lilliput.client.answer_trace import AnswerTrace
from lilliput.client.detokenizer import Detokenizer
from lilliput.client.server_session import HopStats
from lilliput.errors import CacheFull
from lilliput.gateway.account import Account
from lilliput.gateway.echo import Echo
from lilliput.gateway.piece import Piece, Token
from lilliput.gateway.sampler import Constraint, Sampler, Sampling
from lilliput.gateway.served_model import ServedModel
from lilliput.gateway.stops import Stops
from lilliput.gateway.visit import current

#: so many tokens of a prompt decide how the text after it begins
_CONTEXT = 4


@dataclass(frozen=True)
class Order:
    """What is wanted after a prompt.

    :param max_tokens: of the answer
    :param sure: the caller named `max_tokens`, and shall get them
    :param likelihoods: note those of the tokens, and of so many of the likeliest
    :param constraint: which tokens may come; no other answer's
    :param keep_special: special tokens are text, too: the model marks its calls of tools with them
    :param continues: the answer is the same text as the prompt, not another's
    :param echo: the prompt, to stand before the answer
    :param after: to be waited for. Answers to the same prompt wait for the first, and find its caches on the servers.
    :param begun: to be set when the prompt is computed
    """

    prompt: list[int]
    max_tokens: int
    sure: bool
    sampling: Sampling
    stops: Sequence[str] = ()
    likelihoods: int | None = None
    constraint: Constraint | None = None
    keep_special: bool = False
    continues: bool = False
    echo: Echo | None = None
    after: asyncio.Event | None = None
    begun: asyncio.Event | None = None

    @property
    def plain(self) -> bool:
        """Nothing but the likeliest tokens' ids is wanted."""
        return self.sampling.likeliest and self.likelihoods is None and self.constraint is None


class Choice:
    """Generates one answer. Its counts are right at any time, also when it is given up."""

    def __init__(self, model: ServedModel, order: Order, account: Account) -> None:
        self._model, self._order, self._account = model, order, account
        #: tokens generated so far, the end's own not among them
        self.tokens = 0
        #: tokens of the prompt that all servers had in their caches
        self.cached = 0

    async def pieces(self) -> AsyncIterator[Piece]:
        """The answer. Close the iterator to give the servers' caches back."""
        order, model, echo = self._order, self._model, self._order.echo
        if order.after is not None:
            await order.after.wait()
        sampler = Sampler(order.sampling, order.prompt, top=order.likelihoods, constraint=order.constraint)
        stops = Stops(order.stops)
        before = order.prompt[-_CONTEXT:] if order.continues else []
        detokenizer = Detokenizer(model.tokenizer, keep_special=order.keep_special, before=before)
        waiting: list[Token] = []  # their text is still to be shown
        opening = iter(()) if echo is None else echo.pieces()
        decoded = shown = 0 if echo is None else len(echo.text)
        told = 0
        visit, trace = current(), AnswerTrace(model.metrics.saw_step)
        session = model.session(len(order.prompt), order.max_tokens, sure=order.sure, request_id=visit.id, trace=trace)
        stream = model.decoder.stream(
            order.prompt,
            max_new_tokens=order.max_tokens,
            sampler=None if order.plain else sampler,  # the decoder's own is one for all streams
            reader=echo.read if echo is not None and echo.top is not None and order.after is None else None,
            stop_ids=model.end_ids,
            session=session,
            on_ends=trace.saw_ends,
        )
        try:
            finish = "stop"
            async with contextlib.aclosing(stream):  # type: ignore[type-var]
                try:
                    async for token in stream:
                        self.tokens += 1
                        self._account.use_answer(1)
                        if self.tokens == 1:
                            model.metrics.saw_first_token(trace.first_seconds)
                            self._saw_prompt(session.stats)
                            for piece in opening:
                                yield piece
                        text = detokenizer.take([token])
                        if order.likelihoods is not None:
                            waiting.append(Token(token, sampler.likelihoods.popleft(), decoded))
                        decoded += len(text)
                        text = stops.take(text)
                        shown += len(text)
                        if text:
                            news, told = session.recoveries[told:], len(session.recoveries)
                            yield Piece(text, _before(waiting, shown), recoveries=news)
                        if stops.found:
                            break
                    else:
                        finish = "length" if self.tokens == order.max_tokens else "stop"
                except CacheFull:
                    if order.sure or not self.tokens:
                        raise
                    finish = "length"  # the servers have no more room, which nobody promised
            if not self.tokens:
                self._saw_prompt(session.stats)
                for piece in opening:
                    yield piece
            if order.continues and sampler.likelihoods:  # the end is a token, too, if one without a text
                ending = sampler.likelihoods.popleft()
                waiting.append(Token(ending.token, ending, decoded))
            rest = stops.rest()
            yield Piece(rest, waiting if not stops.found else [], finish, session.recoveries[told:])
        finally:
            model.metrics.saw_answer(prompt=len(order.prompt), cached=self.cached, tokens=self.tokens)
            for recovery in session.recoveries:
                model.metrics.saw_recovery(recovery)
            hops = session.hops
            await session.close()
            visit.saw_answer(
                trace,
                await model.round_trips(hops),
                prompt_tokens=len(order.prompt),
                cached_tokens=self.cached,
                tokens=self.tokens,
                recoveries=session.recoveries,
            )

    def _saw_prompt(self, stats: Sequence[HopStats]) -> None:
        """The servers have computed it."""
        computed = max((hop.computed_tokens for hop in stats), default=0)
        self.cached = max(0, len(self._order.prompt) - computed)
        if self._order.begun is not None:
            self._order.begun.set()


def _before(waiting: list[Token], shown: int) -> list[Token]:
    """Take the tokens whose text begins before `shown`."""
    count = sum(token.offset < shown for token in waiting)
    taken = waiting[:count]
    del waiting[:count]
    return taken


async def merged(choices: Sequence[Choice]) -> AsyncIterator[tuple[int, Piece]]:
    """The pieces of several answers as they come, with the number of the answer. The first error ends all."""
    pieces: asyncio.Queue[tuple[int, Piece] | BaseException | None] = asyncio.Queue()

    async def pump(number: int, choice: Choice) -> None:
        try:
            async with contextlib.aclosing(choice.pieces()) as stream:  # type: ignore[type-var]
                async for piece in stream:
                    pieces.put_nowait((number, piece))
        except Exception as e:
            pieces.put_nowait(e)
        else:
            pieces.put_nowait(None)

    pumps = [asyncio.create_task(pump(number, choice)) for number, choice in enumerate(choices)]
    try:
        ended = 0
        while ended < len(pumps):
            got = await pieces.get()
            if isinstance(got, BaseException):
                raise got
            if got is None:
                ended += 1
            else:
                yield got
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
