"""A session over a whole chain of servers, for callers that are not asynchronous."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from types import TracebackType

import torch

from lilliput.client.async_session import AsyncInferenceSession
from lilliput.client.audit import AuditCounts
from lilliput.client.connection import SharedConnection
from lilliput.client.recovery import Recovery
from lilliput.client.route import Hop
from lilliput.client.server_session import HopStats
from lilliput.errors import LilliputError


def _forgotten(shared: SharedConnection, session: AsyncInferenceSession) -> None:
    with contextlib.suppress(LilliputError):
        shared.loop.submit(session.close())


class InferenceSession:
    """A session over a chain of servers: their attention caches for some rows of tokens.

        with model.inference_session(max_length=512) as session:
            model.generate(...)          # the caches stay between calls
            session.position -= 5        # forget the last five tokens

    or, below the model's own embedding and head, `session.step(hidden_states)`. See `AsyncInferenceSession` for what
    the parameters mean; every call here waits for its result.
    """

    def __init__(
        self, shared: SharedConnection, session: AsyncInferenceSession, active: list[InferenceSession] | None = None
    ) -> None:
        self._shared, self._session = shared, session
        self._active = active
        # a session that is forgotten must not hold its caches as long as the program runs
        weakref.finalize(self, _forgotten, shared, session).atexit = False

    @property
    def core(self) -> AsyncInferenceSession:
        """The asynchronous session, for use on the connection's loop."""
        return self._session

    @property
    def position(self) -> int:
        """Tokens per row in the caches. May be set back."""
        return self._session.position

    @position.setter
    def position(self, position: int) -> None:
        self._session.position = position

    @property
    def max_length(self) -> int:
        """Tokens per row that the session may hold. May be raised."""
        return self._session.max_length

    @max_length.setter
    def max_length(self, max_length: int) -> None:
        self._session.max_length = max_length

    @property
    def rows(self) -> int:
        """Sequences in the session; 0 before its first step."""
        return self._session.rows

    @property
    def max_rows(self) -> int:
        """Sequences that the session can hold."""
        return self._session.max_rows

    @property
    def tokens(self) -> torch.Tensor:
        """int64 `[rows, position]`: the ids in the caches; below 0 where they are padding or not known."""
        return self._session.history.tokens

    @property
    def hops(self) -> list[Hop]:
        """The chain of servers, once the first step has opened it."""
        return self._session.hops

    @property
    def stats(self) -> list[HopStats]:
        """For each server: steps, tokens computed, milliseconds queued and computing, bytes."""
        return self._session.stats

    @property
    def recoveries(self) -> list[Recovery]:
        """What happened to its servers so far: who took over what, why, and how long a step waited for it."""
        return self._session.recoveries

    @property
    def audits(self) -> AuditCounts:
        """How often others agreed with what its servers returned, who was found out, and how often nobody could tell.
        Zeros unless the model was made with `audit`."""
        return self._session.audits

    def step(
        self,
        hidden_states: torch.Tensor,
        *,
        mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        parents: Sequence[int] | None = None,
        start_position: int | None = None,
        prompts: torch.Tensor | None = None,
        tokens: torch.Tensor | None = None,
        needed: int | None = None,
    ) -> torch.Tensor:
        """Hidden states `[rows, tokens, hidden]` in, outputs out. See `AsyncInferenceSession.step`."""
        return self._shared.run(
            self._session.step(
                hidden_states,
                tokens=tokens,
                needed=needed,
                mask=mask,
                position_ids=position_ids,
                parents=parents,
                start_position=start_position,
                prompts=prompts,
            )
        )

    def reorder(self, parents: Sequence[int]) -> None:
        """From the next step on, new row i continues old row `parents[i]`."""
        self._session.reorder(parents)

    def continues(self, tokens: torch.Tensor) -> tuple[list[int], int]:
        """For each row of `tokens` the row of the session to continue, and how many tokens they all share with it."""
        return self._session.history.continues(tokens)

    def restart(self, rows: int | None = None) -> None:
        """Give the caches back and begin anew with the next step, perhaps with room for another number of rows."""
        self._shared.run(self._session.restart(rows))

    def close(self) -> None:
        """Give the caches back. May be called twice."""
        self._shared.run(self._session.close())

    def __enter__(self) -> InferenceSession:
        if self._active is not None:
            self._active.append(self)  # the model's generate() finds it there
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._active is not None and self in self._active:
            self._active.remove(self)
        self.close()
