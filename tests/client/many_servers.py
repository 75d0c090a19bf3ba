"""Several servers in one process: `many_servers.py MODEL COUNT REBALANCE_SECONDS LEASE_SECONDS PEER...`.

It writes its servers' peer ids and addresses when all serve. For every line of its input it writes how many tokens each
server has computed. When its input ends, its servers leave.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor

from lilliput import Server

#: servers that start together: they wait for each other's words more than they compute
_AT_ONCE = 6


def main(model: str, count: int, rebalance_seconds: float, lease_seconds: float, peers: list[str]) -> None:
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
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            servers += pool.map(lambda _: start(), range(count))
        tell({str(server.dht.peer_id): list(server.addresses) for server in servers if server.dht})
        for _ in sys.stdin:
            tell(
                {
                    str(server.dht.peer_id): server.service.engine.counters.tokens
                    for server in servers
                    if server.dht and server.service
                }
            )
    finally:
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(Server.shutdown, servers))


def tell(facts: dict[str, object]) -> None:
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]), sys.argv[5:])
