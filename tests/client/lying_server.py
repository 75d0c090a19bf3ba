"""A server that returns what is slightly wrong: `lying_server.py MODEL START END SHARE`.

It reads the addresses of a swarm to join from its first line of input, and writes its peer id when it serves. SHARE
says how wrong it is, as a share of what its blocks do to the hidden states. When its input ends, it leaves.
"""

from __future__ import annotations

import json
import sys

import torch

from lilliput import Server


def main(model: str, start: int, end: int, share: float) -> None:
    peers = json.loads(sys.stdin.readline())
    torch.manual_seed(1)
    with Server(model, (start, end), initial_peers=peers, dtype="float32", cache_tokens=4096, threads=1) as server:
        assert server.service is not None
        assert server.dht is not None
        span = server.service.span
        honest = span.paged
        wrong = torch.nn.functional.normalize(torch.randn(span.hidden_size), dim=0)

        def lie(hidden: torch.Tensor, *rest: object) -> torch.Tensor:
            inputs = hidden.clone()  # of which outputs may be a part
            outputs = honest(hidden, *rest)
            return outputs + share * torch.linalg.vector_norm(outputs - inputs, dim=-1, keepdim=True) * wrong

        span.paged = lie  # type: ignore[method-assign, assignment]
        print(server.dht.peer_id, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
