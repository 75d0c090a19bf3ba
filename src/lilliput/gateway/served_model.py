"""The model that the gateway serves: its tokenizer, its limits, and the decoder for all streams."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lilliput.client.answer_trace import AnswerTrace
from lilliput.client.async_session import AsyncInferenceSession
from lilliput.client.costs import RoundTripTimes
from lilliput.client.decoder import Decoder
from lilliput.client.route import Hop
from lilliput.errors import Unreachable
from lilliput.gateway.metrics import Metrics
from lilliput.gateway.problems import Problem, nobody_there
from lilliput.gateway.vocabulary import Vocabulary
from lilliput.swarm.records import ServerRecord

#: an answer without a limit begins with a promise of so many tokens, and asks the servers for more as it grows
_FIRST_PROMISE = 256


class ServedModel:
    """One model of a swarm.

    :param model: from `AutoDistributedModelForCausalLM.from_pretrained`, for the gateway alone
    :param tokenizer: Hugging Face's
    :param aliases: other names under which requests may name it
    :ivar remote: its blocks in the swarm, with an adapter or without
    """

    def __init__(self, name: str, model: Any, tokenizer: Any, *, aliases: Sequence[str] = ()) -> None:
        self.name, self.names = name, {name, *aliases}
        self.created = int(time.time())
        self.tokenizer = tokenizer
        self.decoder = Decoder(model)
        self.remote = self.decoder.remote
        self.metrics = Metrics(name)
        self.vocabulary = Vocabulary(tokenizer)
        self.size = int(model.config.get_text_config().vocab_size)
        config = model.generation_config
        #: what the model's makers have chosen, not what transformers does where they say nothing
        self.defaults: dict[str, Any] = {
            name: value
            for name, value in config.to_diff_dict().items()
            if name in ("temperature", "top_p", "top_k", "repetition_penalty") and value is not None
        }
        ends = config.eos_token_id
        self.end_ids = {*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id} - {None}
        self.template: str = _template_of(tokenizer)
        self._made_for = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 1 << 30
        self._tokenizing = threading.Lock()
        self._longest_token = max(len(text.encode()) for text in tokenizer.get_vocab())

    def close(self) -> None:
        self.decoder.close()

    def called(self, name: str) -> ServedModel | None:
        """What a request means by `NAME` or `NAME:ADAPTER`: this model, or this one with an adapter. None: neither."""
        if name in self.names:
            return self
        known, _, adapter = name.rpartition(":")
        if known not in self.names or not adapter:
            return None
        adapted = copy.copy(self)
        adapted.name, adapted.remote = f"{self.name}:{adapter}", replace(self.remote, adapter=adapter)
        return adapted

    async def max_length(self) -> int:
        """Tokens of prompt and answer together, as the chain allows now. Raises `MissingBlocks`, or `Problem`."""
        try:
            chain = await self.remote.chain(0, self.remote.blocks)
        except Unreachable as e:
            raise nobody_there() from e
        return min([self._made_for, *(hop.record.max_length for hop in chain if hop.record.max_length)])

    async def servers(self) -> list[ServerRecord]:
        """Those that announce blocks of the model."""
        remote = self.decoder.remote
        return await remote.connection.records(remote.name)

    def session(
        self, prompt_tokens: int, answer_tokens: int, *, sure: bool, request_id: str, trace: AnswerTrace
    ) -> AsyncInferenceSession:
        """A new session. If `sure`, servers promise the whole answer's cache at once; else it may run out later.

        :param trace: is told about its steps
        """
        promised = answer_tokens if sure else min(answer_tokens, _FIRST_PROMISE)
        return AsyncInferenceSession(
            self.remote,
            max_length=prompt_tokens + promised,
            extend=not sure,
            request_id=request_id,
            on_step=trace.saw_step,
        )

    async def round_trips(self, hops: Sequence[Hop]) -> RoundTripTimes:
        """What is known of the ways to some servers."""
        return await self.remote.connection.round_trips([hop.record for hop in hops], within=0.0)

    # ---- from texts to tokens; these take time, call them in a thread

    def encode(self, text: str, *, limit: int, special: bool = True) -> list[int]:
        """A text's tokens. Raises `Problem` if they are more than `limit`, early if there can be no doubt."""
        at_least = len(text.encode()) // self._longest_token
        if at_least > limit:
            raise too_long(limit, f"at least {at_least}")
        with self._tokenizing:
            ids: list[int] = self.tokenizer(text, add_special_tokens=special)["input_ids"]
        return ids

    def text_of(self, tokens: Sequence[int]) -> str:
        """What tokens stand for, whatever stands for nothing in a text included."""
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        *,
        limit: int,
        effort: str | None = None,
    ) -> list[int]:
        """The tokens of a conversation as the model was taught to read it, up to where its answer begins.

        :param effort: how much it shall reason before, under the names that templates have for it; others ignore them
        """
        wishes: dict[str, Any] = {"reasoning_effort": effort} if effort else {}
        if effort == "none":
            wishes["enable_thinking"] = False
        if not self.template:
            raise Problem(f"{self.name} has no chat template: it was not made to talk. Use /v1/completions.")
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=True, tokenize=False, **wishes
            )
        except Exception as e:  # a template is a program of the model's makers
            said = " ".join(str(e).split())[:200]
            raise Problem(
                f"The chat template of {self.name} does not take these messages: {said}", param="messages"
            ) from e
        return self.encode(text, limit=limit, special=False)


def too_long(limit: int, prompt: int | str, answer: int | None = None) -> Problem:
    """The error for more tokens than the model takes, in the words that clients look for."""
    asked = f"your request has {prompt} tokens of prompt" + (f" and asks for {answer} more" if answer else "")
    return Problem(
        f"This model's maximum context length is {limit} tokens, but {asked}.", code="context_length_exceeded"
    )


def _template_of(tokenizer: Any) -> str:
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):  # some have one for each purpose
        template = template.get("tool_use") or template.get("default")
    return template or ""
