"""Speaks HTTP on an event loop that has other work, too."""

from __future__ import annotations

import contextlib
import socket
from concurrent.futures import Future

import uvicorn
from starlette.types import ASGIApp

from lilliput.errors import BadRequest
from lilliput.swarm.loop import LoopThread

_BACKLOG = 2048
_LEAVE_SECONDS = 3


class HttpServer:
    """Serves `app` on `loop`, where the sessions live: no request crosses a thread on its way.

    :param port: 0 takes a free one

    Raises `BadRequest` if nobody can listen there.
    """

    def __init__(self, app: ASGIApp, loop: LoopThread, *, host: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        except OSError as e:
            raise BadRequest(f"cannot listen on {host}, port {port}: {e.strerror or e}") from e
        self.port: int = self._socket.getsockname()[1]
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self.port}"
        config = uvicorn.Config(
            app, log_config=None, access_log=False, lifespan="off", http="h11", ws="none", server_header=False,
            timeout_graceful_shutdown=_LEAVE_SECONDS,
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        self._serving: Future[None] = loop.submit(self._server.serve(sockets=[self._socket]))

    @property
    def serves(self) -> bool:
        return not self._serving.done()

    def close(self) -> None:
        """Take no more requests, end those that run within seconds."""
        self._server.should_exit = True
        with contextlib.suppress(Exception):
            self._serving.result(_LEAVE_SECONDS + 2)
        self._socket.close()
