"""Names of the calls. Each is a raw p2p stream that carries messages of `lilliput.proto` (see `Channel`)."""

from __future__ import annotations

#: Open -> Info..., then Step -> Output, Ping -> Pong, until Close: a session
FORWARD_INCREMENTAL = "lilliput.rpc_forward_incremental"
#: Forward -> Output, repeated on one stream as often as the client likes
FORWARD = "lilliput.rpc_forward"
#: Backward -> Output, repeated likewise
BACKWARD = "lilliput.rpc_backward"
#: Ping -> Pong, repeated: how long the way to a server and back takes
PING = "lilliput.rpc_ping"
#: Push..., each answered by Taken: from one server to the sessions of another
PUSH = "lilliput.rpc_push"
#: DialBack -> Dialled: whether a peer can be reached from outside
DIAL_BACK = "lilliput.rpc_dial_back"
