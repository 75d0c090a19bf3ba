"""Speaks HTTP on an event loop that has other work, too."""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
from collections.abc import Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING

from lilliput.errors import BadRequest
from lilliput.swarm.loop import LoopThread

if TYPE_CHECKING:
    from starlette.types import ASGIApp

_BACKLOG = 2048
_STOP_SECONDS = 2


class Listener:
    """A port that is taken. It needs none of the libraries that answer there.

    :param port: 0 takes a free one

    Raises `BadRequest` if nobody can listen there.
    """

    def __init__(self, host: str, port: int) -> None:
        self._asked = f"{host}, port {port}"
        self.socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        with self._explained():
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that linger are no obstacle
            if self.socket.family == socket.AF_INET6:
                self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            self.socket.bind((host, port))
        self.port: int = self.socket.getsockname()[1]
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self.port}"

    def listen(self) -> None:
        """From now on connections are not refused, but wait until somebody answers them. May be called twice."""
        with self._explained():
            self.socket.listen(_BACKLOG)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as e:
            self.close()
            reason = (e.strerror or str(e)).partition(" (while")[0]  # the address is named already
            todo = "; choose another --port" if e.errno in (errno.EADDRINUSE, errno.EACCES) else ""
            raise BadRequest(f"cannot listen on {self._asked}: {reason}{todo}") from e

    def close(self) -> None:
        """May be called twice."""
        self.socket.close()


class HttpServer:
    """Serves `app` on `loop`, where the sessions live: no request crosses a thread on its way.

    :param patience: at its end, requests that run have so many seconds to come to theirs
    """

    def __init__(self, app: ASGIApp, loop: LoopThread, listener: Listener, *, patience: int = 3) -> None:
        import uvicorn

        listener.listen()
        config = uvicorn.Config(
            app, log_config=None, access_log=False, lifespan="off", http="h11", ws="none", server_header=False,
            timeout_graceful_shutdown=patience,
        )  # fmt: skip
        self._patience, self._listener, self._server = patience, listener, uvicorn.Server(config)
        self._serving: Future[None] = loop.submit(self._server.serve(sockets=[listener.socket]))

    @property
    def serves(self) -> bool:
        return not self._serving.done()

    def close(self) -> None:
        """Take no more requests, and end those that run."""
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # that some are cut off now is no error
        self._server.should_exit = True
        with contextlib.suppress(Exception):
            self._serving.result(self._patience + _STOP_SECONDS)
        self._listener.close()
