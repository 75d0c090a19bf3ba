"""The process that started a server and waits for it, as that server sees it.

They speak over the server's standard streams: the supervisor writes one JSON line with the addresses to join, and the
server writes JSON lines: `{"stage": ...}` for every stage of its start, then its facts. When the supervisor's end of
the pipe closes, however that came about, the server leaves.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from typing import Any


class Supervisor:
    """Whoever started this process.

    :ivar gone: it does not wait for us any more
    """

    def __init__(self) -> None:
        self.gone = False
        self._peers: list[str] = []
        self._told_peers = threading.Event()
        threading.Thread(target=self._listen, name="supervisor", daemon=True).start()

    def peers(self) -> list[str]:
        """Addresses of the swarm to join; waits until the supervisor knows them."""
        while not self._told_peers.wait(0.5):  # so that signals are taken meanwhile
            pass
        return self._peers

    def stage(self, name: str) -> None:
        """Tell what is being done now."""
        self.tell({"stage": name})

    def tell(self, facts: dict[str, Any]) -> None:
        print(json.dumps(facts), flush=True)

    def _listen(self) -> None:
        # not through sys.stdin: at its end the interpreter could not close what a thread still reads
        heard = b""
        try:
            while chunk := os.read(0, 4096):
                heard += chunk
                if b"\n" in heard and not self._told_peers.is_set():
                    self._peers = json.loads(heard.partition(b"\n")[0])
                    self._told_peers.set()
        finally:
            self.gone = True
            os.kill(os.getpid(), signal.SIGTERM)
