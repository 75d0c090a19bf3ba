"""Several servers in one process: `many_servers.py MODEL COUNT AT_ONCE REBALANCE_SECONDS LEASE_SECONDS PEER...`.

It writes its servers' peer ids and addresses when all serve. When its input ends, its servers leave.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor

from lilliput import Server


def main(
    model: str, count: int, at_once: int, rebalance_seconds: float, lease_seconds: float, peers: list[str]
) -> None:
    def start() -> Server:
        server = Server(
            model,
            initial_peers=peers,
            num_blocks=2,
            rebalance_seconds=rebalance_seconds,
            dtype="float32",
            threads=1,
            cache_tokens=1024,
            lease_seconds=lease_seconds,
        )
        server.run_in_background()
        return server

    servers: list[Server] = []
    try:
        with ThreadPoolExecutor(at_once) as pool:
            servers += pool.map(lambda _: start(), range(count))
        print(json.dumps({str(server.dht.peer_id): server.addresses for server in servers if server.dht}), flush=True)
        sys.stdin.read()
    finally:
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(Server.shutdown, servers))


if __name__ == "__main__":
    _, name, servers, together, looks, lease, *others = sys.argv
    main(name, int(servers), int(together), float(looks), float(lease), others)
