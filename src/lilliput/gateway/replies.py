"""Answers in the shapes of the API: whole, or chunk by chunk."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lilliput.client.recovery import Recovery
from lilliput.gateway.choice import Choice
from lilliput.gateway.likelihood import Likelihood
from lilliput.gateway.piece import Piece, Token
from lilliput.gateway.tools import Call, CallReader
from lilliput.gateway.vocabulary import Vocabulary

#: JSON has no infinity; this is what OpenAI says instead
_IMPOSSIBLE = -9999.0


def usage(prompts: Sequence[Sequence[int]], choices: Sequence[Choice]) -> dict[str, Any]:
    """Counts of tokens. A prompt counts once, however many answers it has."""
    prompt, answer = sum(map(len, prompts)), sum(choice.tokens for choice in choices)
    cached = sum(choice.cached for choice in choices[:: max(1, len(choices) // len(prompts))])
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def told(recoveries: Sequence[Recovery]) -> dict[str, Any]:
    """A field that OpenAI's answers do not have, and their clients ignore: from which servers others took over."""
    facts = [{"blocks": [r.start, r.end], "seconds": round(r.seconds, 3), "moved": r.moved} for r in recoveries]
    return {"lilliput": {"recoveries": facts}} if facts else {}


class Reply(ABC):
    """The common part. Give it the pieces as they come."""

    kind, chunk_kind, prefix = "", "", ""

    def __init__(self, model: str, vocabulary: Vocabulary, *, likelihoods: bool) -> None:
        self._vocabulary, self._likelihoods = vocabulary, likelihoods
        self._head = {"id": self.prefix + secrets.token_hex(12), "created": int(time.time()), "model": model}

    @abstractmethod
    def take(self, number: int, piece: Piece) -> list[dict[str, Any]]:
        """What to stream of a piece of answer `number`: choices, each for a chunk of its own."""

    @abstractmethod
    def choices(self) -> list[dict[str, Any]]:
        """The whole answers."""

    def chunk(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {**self._head, "object": self.chunk_kind, "choices": choices, **more}

    def whole(self, counts: dict[str, Any]) -> dict[str, Any]:
        return {**self._head, "object": self.kind, "choices": self.choices(), "usage": counts}


@dataclass
class _Text:
    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    finish: str | None = None


class TextReply(Reply):
    """Of `/v1/completions`."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl-"

    def __init__(self, model: str, vocabulary: Vocabulary, *, likelihoods: bool, answers: int) -> None:
        super().__init__(model, vocabulary, likelihoods=likelihoods)
        self._answers = [_Text() for _ in range(answers)]

    def take(self, number: int, piece: Piece) -> list[dict[str, Any]]:
        answer = self._answers[number]
        answer.text += piece.text
        answer.tokens += piece.tokens
        answer.finish = piece.finish
        if not (piece.text or piece.tokens or piece.finish):
            return []
        return [self._choice(number, piece.text, piece.tokens, piece.finish)]

    def choices(self) -> list[dict[str, Any]]:
        return [self._choice(n, answer.text, answer.tokens, answer.finish) for n, answer in enumerate(self._answers)]

    def _choice(self, number: int, text: str, tokens: list[Token], finish: str | None) -> dict[str, Any]:
        likely = self._of(tokens) if self._likelihoods else None
        return {"index": number, "text": text, "logprobs": likely, "finish_reason": finish}

    def _of(self, tokens: list[Token]) -> dict[str, Any]:
        likely = [token.likelihood for token in tokens]
        return {
            "tokens": [self._vocabulary.text_of(token.id) for token in tokens],
            "token_logprobs": [of and _finite(of.logprob) for of in likely],
            "top_logprobs": [of and self._top(of) for of in likely],
            "text_offset": [token.offset for token in tokens],
        }

    def _top(self, likelihood: Likelihood) -> dict[str, float]:
        """By text, the likeliest first; and the token's own, also if it is none of these. Of tokens that look the same
        (parts of characters do) the likeliest counts."""
        top: dict[str, float] = {}
        for id, value in (*likelihood.top, (likelihood.token, likelihood.logprob)):
            top.setdefault(self._vocabulary.text_of(id), _finite(value))
        return top


@dataclass
class _Message:
    reader: CallReader | None
    text: str = ""
    calls: list[Call] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    finish: str | None = None
    begun: bool = False


class ChatReply(Reply):
    """Of `/v1/chat/completions`.

    :param tools: names of those that may be called
    """

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"

    def __init__(
        self, model: str, vocabulary: Vocabulary, *, likelihoods: bool, answers: int, tools: Sequence[str] = ()
    ) -> None:
        super().__init__(model, vocabulary, likelihoods=likelihoods)
        self._messages = [_Message(CallReader(tools) if tools else None) for _ in range(answers)]

    def take(self, number: int, piece: Piece) -> list[dict[str, Any]]:
        message = self._messages[number]
        text: str = piece.text
        calls: list[Call] = []
        if message.reader is not None:
            text, calls = message.reader.take(text)
            if piece.finish is not None:
                last, more = message.reader.rest()
                text, calls = text + last, calls + more
        message.text += text
        message.tokens += piece.tokens
        deltas: list[dict[str, Any]] = []
        if text or piece.tokens:
            deltas.append({"content": text})
        for call in calls:
            deltas.append({"tool_calls": [{"index": len(message.calls), **_called(call)}]})
            message.calls.append(call)
        if piece.finish is not None:
            message.finish = "tool_calls" if message.calls and piece.finish == "stop" else piece.finish
        return self._chunks(number, message, deltas, piece.tokens, ended=piece.finish is not None)

    def _chunks(
        self, number: int, message: _Message, deltas: list[dict[str, Any]], tokens: list[Token], *, ended: bool
    ) -> list[dict[str, Any]]:
        if not message.begun:
            message.begun = True
            deltas = [{"role": "assistant", "content": ""}, *deltas]
        chunks: list[dict[str, Any]] = [
            {"index": number, "delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas
        ]
        if self._likelihoods and tokens:
            for chunk in chunks:
                if chunk["delta"].get("content") is not None and "role" not in chunk["delta"]:
                    chunk["logprobs"] = self._of(tokens)
        if ended:
            chunks.append({"index": number, "delta": {}, "logprobs": None, "finish_reason": message.finish})
        return chunks

    def choices(self) -> list[dict[str, Any]]:
        return [self._choice(number, message) for number, message in enumerate(self._messages)]

    def _choice(self, number: int, message: _Message) -> dict[str, Any]:
        said: dict[str, Any] = {"role": "assistant", "content": message.text, "refusal": None}
        if message.calls:
            said["content"] = message.text or None
            said["tool_calls"] = [_called(call) for call in message.calls]
        likely = self._of(message.tokens) if self._likelihoods else None
        return {"index": number, "message": said, "logprobs": likely, "finish_reason": message.finish}

    def _of(self, tokens: list[Token]) -> dict[str, Any]:
        content = [
            {
                **self._token(token.id, token.likelihood.logprob),
                "top_logprobs": [self._token(id, value) for id, value in token.likelihood.top],
            }
            for token in tokens
            if token.likelihood is not None
        ]
        return {"content": content, "refusal": None}

    def _token(self, id: int, logprob: float) -> dict[str, Any]:
        written = self._vocabulary.bytes_of(id)
        return {"token": written.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(written)}


def _called(call: Call) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _finite(logprob: float) -> float:
    return max(logprob, _IMPOSSIBLE)
