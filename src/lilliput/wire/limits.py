"""Bounds on what a peer may send. Each is named once, with its reason."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Bounds on one message. Both sides check them before they allocate anything."""

    #: the protobuf header: parents, position lists and prefix keys of long prompts fit, garbage does not
    max_header_bytes: int = 1 << 20
    #: all tensors of one message together. A prefix is sent in several steps when it is longer.
    max_payload_bytes: int = 256 << 20
    max_tensors: int = 8


DEFAULT_LIMITS = Limits()

#: the server awaits a session's first step this long after it accepted (seconds)
FIRST_STEP_SECONDS = 10.0
#: nothing heard from the client for this long: the session is closed (seconds)
SESSION_IDLE_SECONDS = 30.0
#: pings alone keep a session that was accepted and never stepped for so long (seconds); a prompt may take its time in
#: the servers before
UNUSED_SECONDS = 300.0
#: clients ping at this fraction of the idle time
PING_FRACTION = 1 / 3
#: random bytes that let another server push steps into a session
PUSH_KEY_BYTES = 16
#: one peer may send so many bytes a second on average: more than a line of a gigabit carries
PEER_BYTES_PER_SECOND = float(128 << 20)
#: and so many seconds' worth of them at once
PEER_BURST_SECONDS = 2.0
