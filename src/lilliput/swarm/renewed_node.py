"""A client's node, which outlives its daemon."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

from lilliput.errors import LilliputError
from lilliput.swarm.node import Node

logger = logging.getLogger(__name__)

#: between two tries to start another daemon (seconds)
_AGAIN_SECONDS = 1.0


class RenewedNode:
    """A `Node` that is started again, as another peer, when its p2p daemon ends. Belongs to one event loop.

    Its streams have ended then, as if all servers had died at once.
    """

    def __init__(self, **options: Any) -> None:
        """:param options: of `Node.start`, which begins at once"""
        self._options = options
        self._starting = asyncio.ensure_future(Node.start(**options))
        self._watching = asyncio.ensure_future(self._watch())

    async def get(self) -> Node:
        """The node, once it has started. Raises what went wrong if it could not."""
        return await asyncio.shield(self._starting)

    def try_again(self) -> None:
        """If it could not be started, begin once more."""
        if self._starting.done() and not self._starting.cancelled() and self._starting.exception() is not None:
            self._starting = asyncio.ensure_future(Node.start(**self._options))
            self._watching = asyncio.ensure_future(self._watch())

    async def close(self) -> None:
        """Stop it, also while it starts."""
        self._watching.cancel()
        self._starting.cancel()
        with contextlib.suppress(asyncio.CancelledError, LilliputError):
            await (await self._starting).stop()

    async def _watch(self) -> None:
        with contextlib.suppress(LilliputError):  # whoever asks for the node hears of it
            node = await self.get()
            while True:
                await node.lost()
                logger.warning("this client's p2p daemon has ended; another one starts")
                self._starting = asyncio.ensure_future(self._start_another(node))
                node = await self.get()

    async def _start_another(self, lost: Node) -> Node:
        await lost.stop()
        while True:
            try:
                return await Node.start(**self._options)
            except LilliputError as e:
                logger.warning("%s; trying again", e)
            await asyncio.sleep(_AGAIN_SECONDS)
