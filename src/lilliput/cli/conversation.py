"""A conversation: what was said, and the session in the swarm that remembers it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lilliput.cli.answer import Answer
from lilliput.cli.language_model import LanguageModel
from lilliput.errors import BadRequest, CacheFull, LilliputError

if TYPE_CHECKING:
    from lilliput.client.session import InferenceSession


@dataclass(frozen=True)
class Turn:
    """A question, and as much of an answer as came."""

    question: str
    answer: str

    def messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.question}, {"role": "assistant", "content": self.answer}]


class Conversation:
    """One session for all turns: of the next turn, the servers compute only what is new.

    The turns are kept here as well. When the session is lost, the next question opens another, which begins with all of
    them; when they grow too long for the model or its servers, the oldest are dropped.

    :param max_new_tokens: of an answer
    :param options: of `generate()`
    :param notice: takes remarks for a person
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        system: str | None = None,
        max_new_tokens: int = 512,
        options: dict[str, Any] | None = None,
        notice: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.turns: list[Turn] = []
        #: what the servers remember; None when there is nothing
        self.session: InferenceSession | None = None
        self._model, self._system = model, system
        self._max_new_tokens, self._options = max_new_tokens, options or {}
        self._notice = notice

    def ask(self, question: str, answer: Answer) -> None:
        """Have the model answer. However it ends, what came of the answer stays part of the conversation."""
        try:
            self._generate(question, answer)
        except LilliputError:
            self._end_session()
            raise
        finally:
            if answer.text:
                self.turns.append(Turn(question, answer.text))

    def reset(self) -> None:
        """Forget all turns."""
        self.turns.clear()
        self._end_session()

    def close(self) -> None:
        self._end_session()

    def _generate(self, question: str, answer: Answer) -> None:
        limit = self._model.max_length()
        while True:
            ids = self._fit(question, limit)
            count = min(self._max_new_tokens, limit - len(ids))
            session = self._session_for(len(ids) + count)
            before = len(session.recoveries)
            try:
                self._model.generate(ids, session, answer, max_new_tokens=count, **self._options)
                for recovery in session.recoveries[before:]:
                    self._notice(str(recovery))
                return
            except CacheFull:
                if answer.tokens or not self.turns:
                    raise
                # more than the servers have room for beside others; a shorter session may find a place
                self._end_session()
                limit = len(ids) + count - 1

    def _fit(self, question: str, limit: int) -> list[int]:
        """The tokens of the conversation and of a question, with room left for an answer."""
        ids = self._ids(question)
        room = max(limit - self._max_new_tokens, limit // 2)
        dropped = 0
        if len(ids) > room:
            # those that stay have to be computed anew: make room for some turns to come
            while self.turns and len(ids) > room // 2:
                del self.turns[0]
                dropped += 1
                ids = self._ids(question)
        if dropped:
            turns = "turn was" if dropped == 1 else f"{dropped} turns were"
            self._notice(f"the conversation is longer than the {limit} tokens it may have: its oldest {turns} dropped")
        if len(ids) >= limit:
            raise BadRequest(f"this question has {len(ids)} tokens; {self._model.name} and its servers take {limit}")
        return ids

    def _ids(self, question: str) -> list[int]:
        messages = [{"role": "system", "content": self._system}] if self._system is not None else []
        for turn in self.turns:
            messages += turn.messages()
        return self._model.encode_chat([*messages, {"role": "user", "content": question}])

    def _session_for(self, length: int) -> InferenceSession:
        if self.session is None:
            self.session = self._model.session(length)
        self.session.max_length = max(self.session.max_length, length)
        return self.session

    def _end_session(self) -> None:
        session, self.session = self.session, None
        if session is not None:
            with contextlib.suppress(LilliputError):
                session.close()
