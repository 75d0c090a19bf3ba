"""How the members of a private swarm, who have its key, prove that to one another.

Whoever opens a stream or makes a call sends a *token*: a time, random bytes, and a MAC of them with the call's name and
both peer ids. The other side answers with a *proof*, a MAC of the token. libp2p authenticates the peer ids of both ends
and encrypts what passes between them, so neither is worth anything in anyone else's hands, towards anyone else, or for
any other call. No more is sent before the proof has come: what a client has to say is for members alone.
"""

from __future__ import annotations

from hivemind.p2p import PeerID

from lilliput.errors import BadRequest, Unreachable
from lilliput.swarm.swarm_key import NotAMember, SwarmKey
from lilliput.wire import lilliput_pb2 as pb
from lilliput.wire.channel import Channel, error_of

#: a stream must begin within so many seconds
HELLO_SECONDS = 10.0


async def introduce(key: SwarmKey, channel: Channel, call: str, me: PeerID, peer: PeerID) -> None:
    """Begin a stream that we have opened. Raises `Unauthorized` if we are refused, `Unreachable` for an impostor."""
    token = key.token(call, me, peer)
    await channel.send(pb.Message(hello=pb.Hello(token=token)))
    try:
        received = await channel.receive()
    except BadRequest as e:
        raise NotAMember(peer) from e
    if received is not None and isinstance(received.body, pb.Error):
        error = error_of(received.body)
        # one that knows no keys calls our first message a bad one
        raise NotAMember(peer) if isinstance(error, BadRequest) else error
    if received is None or not isinstance(received.body, pb.Welcome):
        raise NotAMember(peer)
    key.check_proof(received.body.proof, token, call, me, peer)


async def welcome(key: SwarmKey, channel: Channel, call: str, me: PeerID, peer: PeerID) -> None:
    """Begin a stream that a peer has opened. Raises what is wrong with it."""
    received = await channel.receive(within=HELLO_SECONDS)
    if received is None:
        raise Unreachable(f"peer {peer} opened a stream and said nothing", str(peer))
    token = received.body.token if isinstance(received.body, pb.Hello) else b""
    key.check_token(token, call, peer, me)
    channel.post(pb.Message(welcome=pb.Welcome(proof=key.proof(token, call, peer, me))))
