"""What one key's requests have used, and what they may use."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lilliput.gateway.problems import Problem

logger = logging.getLogger(__name__)

_MINUTE = 60.0
#: when one of a key's requests will have ended, nobody knows
_SOON = 1.0


@dataclass(frozen=True)
class Limits:
    """Of a key; None: none.

    :ivar requests: at a time, those that wait among them
    :ivar tokens_per_minute: of prompts and answers
    """

    requests: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None


class Allowance:
    """So many a minute. They come back evenly, and those of one minute can be saved. Times are in seconds."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._left, self._seen = float(per_minute), now

    def left(self, now: float) -> float:
        """How many may be used now; below 0 if more were used than there were."""
        back = (now - self._seen) * self.per_minute / _MINUTE
        self._left, self._seen = min(float(self.per_minute), self._left + back), now
        return round(self._left, 6)

    def use(self, count: int, now: float) -> None:
        self._left = self.left(now) - count

    def seconds_until(self, count: float, now: float) -> float:
        """When so many are left."""
        return max(0.0, count - self.left(now)) * _MINUTE / self.per_minute


class Account:
    """One key's.

    An answer is never cut for its tokens: what it uses beyond what is left has to come back before the next request.

    :param name: of the key, for logs and metrics
    :ivar running: requests that are answered or wait
    :ivar requests, refused, prompt_tokens, answer_tokens: so far
    """

    def __init__(
        self, name: str = "", limits: Limits | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name, self._limits, self._clock = name, limits or Limits(), clock
        self.running = self.requests = self.refused = self.prompt_tokens = self.answer_tokens = 0
        requests, tokens = self._limits.requests_per_minute, self._limits.tokens_per_minute
        self._requests = None if requests is None else Allowance(requests, clock())
        self._tokens = None if tokens is None else Allowance(tokens, clock())

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """For as long as a request takes. Raises `Problem` 429 if it is one too many."""
        most, now = self._limits.requests, self._clock()
        if most is not None and self.running >= most:
            raise self._refusal(f"its limit is {most} at a time", _SOON)
        if self._requests is not None and self._requests.left(now) < 1:
            raise self._refusal(
                f"its limit is {self._requests.per_minute} requests a minute", self._requests.seconds_until(1, now)
            )
        if self._tokens is not None and self._tokens.left(now) < 1:
            raise self._refusal(
                f"its limit is {self._tokens.per_minute} tokens a minute", self._tokens.seconds_until(1, now)
            )
        if self._requests is not None:
            self._requests.use(1, now)
        self.requests += 1
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1

    def use_prompt(self, tokens: int) -> None:
        """A prompt is about to be computed. Raises `Problem` 429 if it has more tokens than are left."""
        now = self._clock()
        if self._tokens is not None:
            if tokens > self._tokens.left(now):
                most = self._tokens.per_minute
                wait = self._tokens.seconds_until(tokens, now) if tokens <= most else None
                raise self._refusal(f"its limit is {most} tokens a minute, and this prompt has {tokens}", wait)
            self._tokens.use(tokens, now)
        self.prompt_tokens += tokens

    def use_answer(self, tokens: int) -> None:
        if self._tokens is not None:
            self._tokens.use(tokens, self._clock())
        self.answer_tokens += tokens

    def headers(self) -> dict[str, str]:
        """What is left, as OpenAI's API says it."""
        said: dict[str, str] = {}
        for name, allowance in (("requests", self._requests), ("tokens", self._tokens)):
            if allowance is not None:
                now = self._clock()
                said |= {
                    f"x-ratelimit-limit-{name}": str(allowance.per_minute),
                    f"x-ratelimit-remaining-{name}": str(max(0, math.floor(allowance.left(now)))),
                    f"x-ratelimit-reset-{name}": _duration(allowance.seconds_until(allowance.per_minute, now)),
                }
        return said

    def _refusal(self, why: str, seconds: float | None) -> Problem:
        """:param seconds: after which it is worth another try; None: it never is"""
        self.refused += 1
        logger.info("a request with the key %r is refused: %s", self.name, why)
        again = (
            {"x-should-retry": "false"}
            if seconds is None
            else {"Retry-After": str(max(1, math.ceil(round(seconds, 3))))}
        )
        return Problem(
            f"Too many requests with the key {self.name!r}: {why}.",
            status=429,
            kind="rate_limit_error",
            code="rate_limit_exceeded",
            headers={**again, **self.headers()},
        )


def _duration(seconds: float) -> str:
    """As in `6m0s`."""
    minutes, rest = divmod(round(seconds, 3), _MINUTE)
    return f"{minutes:.0f}m{rest:.4g}s" if minutes else f"{rest:.4g}s"
