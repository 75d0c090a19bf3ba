"""The calls of hivemind's DHT: they know who calls, and nobody calls too often."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from hivemind.p2p import P2P, P2PContext, PeerID

from lilliput.errors import Busy
from lilliput.swarm.allowance import Allowances

_DHT = "DHTProtocol."
#: calls of the DHT that one peer may make, a second on average and at once
CALLS_PER_SECOND, CALLS_AT_ONCE = 200.0, 1000.0

_caller: ContextVar[PeerID | None] = ContextVar("caller", default=None)


def caller() -> PeerID | None:
    """The peer whose call is being answered, authenticated by libp2p; None outside of calls."""
    return _caller.get()


class CallersP2P(P2P):
    """hivemind's handle of the daemon, with a limit on each peer's calls of the DHT.

    Other calls are limited by whoever answers them.
    """

    async def add_protobuf_handler(
        self,
        name: str,
        handler: Callable[..., Any],
        input_protobuf_type: Any,
        *,
        stream_input: bool = False,
        stream_output: bool = False,
        balanced: bool = False,
    ) -> None:
        allowances = Allowances(CALLS_PER_SECOND, CALLS_AT_ONCE)

        async def answer(request: Any, context: P2PContext) -> Any:
            allowance = allowances.of(str(context.remote_id))
            if wait := allowance.wait:
                raise Busy(f"more than {CALLS_PER_SECOND:.0f} calls a second; come back in {wait:.1f} s", wait)
            allowance.take(1)
            before = _caller.set(context.remote_id)
            try:
                return await handler(request, context)
            finally:
                _caller.reset(before)

        await super().add_protobuf_handler(
            name,
            answer if name.startswith(_DHT) else handler,
            input_protobuf_type,
            stream_input=stream_input,
            stream_output=stream_output,
            balanced=balanced,
        )
