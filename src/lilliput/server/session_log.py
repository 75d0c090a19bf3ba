"""What a server's log says about one session."""

from __future__ import annotations

import logging
import time
from collections.abc import MutableMapping
from typing import Any

from lilliput.engine.session import StepOutput
from lilliput.errors import LilliputError
from lilliput.wire import lilliput_pb2 as pb
from lilliput.wire.request_id import checked

logger = logging.getLogger(__name__)

#: of the id that the client has chosen, so much is shown (bytes)
_SHOWN = 8


class SessionLog(logging.LoggerAdapter):
    """Every line names the session, its client, and the request that it serves.

    Raises `BadRequest` for what is no request id: strangers must not write lines of their own.
    """

    def __init__(self, body: pb.Open, peer: str) -> None:
        self._body, self._session, self._peer = body, body.session_id[:_SHOWN].hex(), peer
        super().__init__(logger, {"session": self._session, "peer": peer, "request_id": checked(body.request_id)})
        self._began = time.monotonic()
        self._steps = self._tokens = 0
        self._computing = 0.0
        self._open = False

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        return f"session {self._session} of {self._peer[-8:]}: {msg}", {**kwargs, "extra": self.extra}

    def serves(self, request_id: str) -> None:
        """From now on it serves this request; empty: the same as before. Raises `BadRequest`."""
        if request_id:
            self.extra = {**(self.extra or {}), "request_id": checked(request_id)}

    def opened(self, cached_tokens: int) -> None:
        body, self._open = self._body, True
        self.info(
            "opened after %.2f s for blocks %d:%d, %d x %d tokens, %d of them cached%s",
            *(time.monotonic() - self._began, body.start, body.end, body.rows, body.max_length, cached_tokens),
            "; it repeats what another server was sent" if body.resumes else "",
        )

    def computed(self, result: StepOutput) -> None:
        self._steps += 1
        self._tokens += result.computed_tokens
        self._computing += result.compute_seconds

    def failed(self, step_id: int, why: LilliputError) -> None:
        self.info("step %d failed: %s", step_id, why)

    def ended(self, why: LilliputError) -> None:
        self.info("ended: %s" if self._open else "refused: %s", why)

    def closed(self) -> None:
        if self._open:
            self.info(
                "closed after %.2f s: %d steps, %d tokens computed in %.2f s",
                *(time.monotonic() - self._began, self._steps, self._tokens, self._computing),
            )
