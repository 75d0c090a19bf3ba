"""How a server behaves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lilliput.swarm.directory import LEASE_SECONDS
from lilliput.wire.limits import FIRST_STEP_SECONDS, PEER_BYTES_PER_SECOND, SESSION_IDLE_SECONDS, UNUSED_SECONDS

#: by default: with all the rest, a server that is told to leave is gone within 5 s
DRAIN_SECONDS = 3.0
REBALANCE_SECONDS = 120.0


@dataclass(frozen=True)
class ServerOptions:
    """How a server behaves. Defaults suit a private swarm on one machine or one network.

    :ivar name: what people shall see instead of the peer id's end
    :ivar dtype: float32, bfloat16 or float16
    :ivar device: that computes: cpu, cuda, or one of several, such as cuda:1
    :ivar quantize: None, int8, int4 or nf4: the weights of linear layers
    :ivar cache_dtype: of the attention cache: None, which is `dtype`, or int8
    :ivar cache_tokens: tokens of attention cache, over all rows of all sessions; by default what memory allows
    :ivar max_length: tokens per row that a session may ask for; by default what the model was made for
    :ivar threads: of the processor, for the engine; by default all, in turns with other servers of this machine
    :ivar declare_uids: also declare the blocks in hivemind's own way, so that its `get_experts` finds them
    :ivar adapters: LoRA adapters in PEFT's format: their folders by the names under which clients ask for them
    :ivar num_blocks: how many blocks to hold, where it is not told which; by default as many as fit into memory
    :ivar rebalance_seconds: a server that was not told its blocks looks about this often whether to move; 0: never
    :ivar drain_seconds: how long `drain` lets running sessions move to other servers
    :ivar peer_share: of the cache, at most so much for one peer's sessions
    :ivar peer_rate: bytes a second that one peer may send, on average
    :ivar fair_seconds: while others wait, sessions past their peer's equal share are ended when they have had so long
    :ivar unused_seconds: pings alone keep a session without a first step for so long
    :ivar share_prefixes: let clients find each other's prefixes in the cache (only where members trust each other)
    """

    name: str = ""
    dtype: str = "bfloat16"
    device: str = "cpu"
    quantize: str | None = None
    cache_dtype: str | None = None
    cache_tokens: int | None = None
    max_length: int | None = None
    max_step_tokens: int = 4096
    max_queue: int = 256
    max_sessions_per_peer: int = 256
    peer_share: float = 1.0
    peer_rate: float = PEER_BYTES_PER_SECOND
    first_step_seconds: float = FIRST_STEP_SECONDS
    idle_seconds: float = SESSION_IDLE_SECONDS
    unused_seconds: float = UNUSED_SECONDS
    fair_seconds: float = 5.0
    threads: int | None = None
    declare_uids: bool = False
    share_prefixes: bool = False
    lease_seconds: float = LEASE_SECONDS
    drain_seconds: float = DRAIN_SECONDS
    adapters: Mapping[str, str] = field(default_factory=dict)
    num_blocks: int | None = None
    rebalance_seconds: float = REBALANCE_SECONDS

    @property
    def precision(self) -> str:
        """Of the weights, in a word."""
        return self.quantize or self.dtype
