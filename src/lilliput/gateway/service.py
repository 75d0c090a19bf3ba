"""From requests to answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lilliput.client.recovery import Recovery
from lilliput.gateway import tools as tool_calls
from lilliput.gateway.account import Account
from lilliput.gateway.choice import Choice, Order, merged
from lilliput.gateway.echo import Echo
from lilliput.gateway.grammar import Grammar, Grammars
from lilliput.gateway.piece import Piece
from lilliput.gateway.places import Places
from lilliput.gateway.problems import Problem
from lilliput.gateway.replies import ChatReply, Reply, TextReply, told, usage
from lilliput.gateway.requests import ChatRequest, CompletionRequest, Message, Request, SchemaFormat, Tool
from lilliput.gateway.sampler import Sampling
from lilliput.gateway.served_model import ServedModel, too_long
from lilliput.gateway.swarm_view import SwarmView
from lilliput.swarm.held_model import HeldModel

_COMPLETION_TOKENS = 16
#: answers that one request may ask for
_MOST_ANSWERS = 64
#: of a name that nothing has
_SHOWN = 100


@dataclass
class Job:
    """A request that was understood. Its answers are generated when it has a place."""

    reply: Reply
    prompts: list[list[int]]
    choices: list[Choice]
    places: Places
    account: Account
    with_usage: bool

    async def whole(self) -> dict[str, Any]:
        news: list[Recovery] = []
        async with self._pieces() as pieces:
            async for number, piece in pieces:
                news += piece.recoveries
                self.reply.take(number, piece)
        return {**self.reply.whole(self._counts()), **told(news)}

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        more: dict[str, Any] = {"usage": None} if self.with_usage else {}
        news: list[Recovery] = []
        async with self._pieces() as pieces:
            async for number, piece in pieces:
                news += piece.recoveries
                for choice in self.reply.take(number, piece):
                    yield self.reply.chunk([choice], **more, **told(news))
                    news = []
        if self.with_usage:
            yield self.reply.chunk([], usage=self._counts())

    @contextlib.asynccontextmanager
    async def _pieces(self) -> AsyncIterator[AsyncIterator[tuple[int, Piece]]]:
        async with self.places.one():
            self.account.use_prompt(sum(map(len, self.prompts)))
            async with contextlib.aclosing(merged(self.choices)) as pieces:  # type: ignore[type-var]
                yield pieces

    def _counts(self) -> dict[str, Any]:
        return usage(self.prompts, self.choices)


class Service:
    """Answers requests with one model."""

    def __init__(self, model: ServedModel, places: Places) -> None:
        self.model, self._places = model, places
        self._grammars = Grammars(model)
        self.swarm = SwarmView(model, places)

    async def completion(self, request: CompletionRequest, account: Account) -> Job:
        """Raises `Problem`, or `MissingBlocks`."""
        model = self.called(request.model)
        if request.best_of not in (None, request.n):
            raise Problem("best_of has to equal n: answers are not ranked here.", param="best_of")
        limit = await model.max_length()
        prompts = [await self._prompt(prompt, limit) for prompt in request.prompts]
        if len(prompts) * request.n > _MOST_ANSWERS:
            raise Problem(f"A request may ask for {_MOST_ANSWERS} answers, all prompts together.", param="n")
        sampling = self._sampling(request)
        orders = []
        named = request.max_tokens
        for given, prompt in zip(request.prompts, prompts, strict=True):
            most = self._most_tokens(
                prompt, _COMPLETION_TOKENS if named is None else named, limit, sure=named is not None
            )
            echo = Echo(self._text_of(given), prompt, model.vocabulary, top=request.logprobs) if request.echo else None
            order = Order(prompt, most, True, sampling, request.stops, request.logprobs, continues=True, echo=echo)
            orders.append(order)
        answers = len(prompts) * request.n
        reply = TextReply(model.name, model.vocabulary, likelihoods=request.logprobs is not None, answers=answers)
        return self._job(request, model, account, reply, orders, None)

    async def chat(self, request: ChatRequest, account: Account) -> Job:
        """Raises `Problem`, or `MissingBlocks`."""
        model = self.called(request.model)
        tools = tool_calls.wanted(request, self.model)
        sampling = self._sampling(request)
        limit = await model.max_length()
        messages = [_for_template(message) for message in request.messages]
        described = [tool.model_dump(exclude_unset=True) for tool in tools] or None
        prompt = await asyncio.to_thread(
            self.model.encode_chat, messages, described, limit=limit, effort=request.reasoning_effort
        )
        named = request.max_completion_tokens or request.max_tokens
        most = self._most_tokens(prompt, named or limit, limit, sure=named is not None)
        grammar = await self._grammar(request, tools)
        stops = request.stops
        if tools and not request.parallel_tool_calls:
            stops = [*stops, tool_calls.CLOSE]
        order = Order(
            prompt,
            most,
            named is not None,
            sampling,
            stops,
            (request.top_logprobs or 0) if request.logprobs else None,
            keep_special=bool(tools) and tool_calls.OPEN in self.model.tokenizer.all_special_tokens,
        )
        reply = ChatReply(
            model.name,
            self.model.vocabulary,
            likelihoods=request.logprobs,
            answers=request.n,
            tools=[tool.function.name for tool in tools],
        )
        return self._job(request, model, account, reply, [order], grammar)

    async def metrics_page(self) -> bytes:
        """How things are now, in Prometheus' text format."""
        model = self.model
        model.metrics.saw_places(self._places.taken, self._places.waiting)
        model.metrics.saw_swarm(HeldModel(model.name, model.decoder.remote.blocks, await model.servers()))
        return model.metrics.page()

    def called(self, name: str) -> ServedModel:
        """The model of that name, perhaps with an adapter. Raises `Problem`."""
        model = self.model.called(name)
        if model is None:
            raise Problem(
                f"The model {name[:_SHOWN]!r} does not exist here. This server has {self.model.name!r}.",
                status=404,
                param="model",
                code="model_not_found",
            )
        return model

    def _job(
        self,
        request: Request,
        model: ServedModel,
        account: Account,
        reply: Reply,
        orders: Sequence[Order],
        grammar: Grammar | None,
    ) -> Job:
        choices = []
        for order in orders:
            begun = asyncio.Event()
            for number in range(request.n):
                seed = order.sampling.seed
                choices.append(
                    Choice(
                        model,
                        replace(
                            order,
                            sampling=replace(order.sampling, seed=None if seed is None else seed + number),
                            constraint=grammar.copy() if grammar else None,
                            begun=begun if number == 0 else None,
                            after=begun if number > 0 else None,
                        ),
                        account,
                    )
                )
        with_usage = request.stream_options is not None and request.stream_options.include_usage
        return Job(reply, [order.prompt for order in orders], choices, self._places, account, with_usage)

    async def _prompt(self, prompt: str | list[int], limit: int) -> list[int]:
        if isinstance(prompt, list):
            if max(prompt) >= self.model.size:
                raise Problem(f"The model's tokens are numbered from 0 to {self.model.size - 1}.", param="prompt")
            return prompt
        ids = await asyncio.to_thread(self.model.encode, prompt, limit=limit)
        first = self.model.tokenizer.bos_token_id
        if not ids and first is None:
            raise Problem("The prompt is empty, and this model has no token to begin with.", param="prompt")
        return ids or [first]

    def _text_of(self, prompt: str | list[int]) -> str:
        return prompt if isinstance(prompt, str) else self.model.text_of(prompt)

    @staticmethod
    def _most_tokens(prompt: Sequence[int], most: int, limit: int, *, sure: bool) -> int:
        """How long the answer may become. What was asked for is never cut, but refused."""
        room = limit - len(prompt)
        if room < min(most, 1) or (sure and most > room):
            raise too_long(limit, len(prompt), most if sure else None)
        return min(most, room)

    def _sampling(self, request: Request) -> Sampling:
        defaults = self.model.defaults

        def chosen(name: str, otherwise: float) -> Any:
            given = getattr(request, name)
            return defaults.get(name, otherwise) if given is None else given

        bias = {int(token): value for token, value in request.logit_bias.items()}
        if bias and max(bias) >= self.model.size:
            raise Problem(f"The model's tokens are numbered from 0 to {self.model.size - 1}.", param="logit_bias")
        return Sampling(
            temperature=chosen("temperature", 1.0),
            top_p=chosen("top_p", 1.0),
            top_k=max(0, chosen("top_k", 0)),
            min_p=request.min_p,
            seed=request.seed,
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            repetition_penalty=chosen("repetition_penalty", 1.0),
            logit_bias=bias,
        )

    async def _grammar(self, request: ChatRequest, tools: Sequence[Tool]) -> Grammar | None:
        if tools and (lark := tool_calls.grammar(request, tools)):
            return await asyncio.to_thread(self._grammars.lark, lark, "tools")
        wanted = request.response_format
        if wanted is None or wanted.type == "text":
            return None
        schema = wanted.json_schema.json_schema if isinstance(wanted, SchemaFormat) else None
        return await asyncio.to_thread(self._grammars.json, schema, "response_format")


def _for_template(message: Message) -> dict[str, Any]:
    """A message as chat templates expect it."""
    role = "system" if message.role == "developer" else message.role
    said: dict[str, Any] = {"role": role, "content": message.text}
    if message.name is not None:
        said["name"] = message.name
    if message.tool_call_id is not None:
        said["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        said["tool_calls"] = [
            _call_for_template(call.function.name, call.function.arguments) for call in message.tool_calls
        ]
    return said


def _call_for_template(name: str, arguments: str) -> dict[str, Any]:
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        raise Problem("The arguments of a tool call must be JSON.", param="messages") from None
    return {"type": "function", "function": {"name": name, "arguments": parsed}}
