"""hivemind's own calls, its DHT's among them, in a private swarm: with proofs of membership, both ways."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Callable
from typing import Any

from google.protobuf.message import DecodeError
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto.p2pd_pb2 import RPCError
from hivemind.utils.asyncio import as_aiter, asingle

from lilliput.errors import LilliputError
from lilliput.swarm.callers import CallersP2P
from lilliput.swarm.swarm_key import NotAMember, SwarmKey
from lilliput.wire import lilliput_pb2 as pb


class SealedP2P(CallersP2P):
    """hivemind's handle of the daemon, for members only.

    Every message travels inside a `Sealed`. hivemind's authorizers see no peer ids and wrap no streams; this does both.

    :ivar key: to be set as soon as it is made
    """

    key: SwarmKey

    async def add_protobuf_handler(
        self,
        name: str,
        handler: Callable[..., Any],
        input_protobuf_type: Any,
        *,
        stream_input: bool = False,
        stream_output: bool = False,
        balanced: bool = False,
    ) -> None:
        key = self.key

        async def answer(sealed: pb.Sealed, context: P2PContext) -> pb.Sealed:
            ends = name, context.remote_id, context.local_id
            key.check_token(sealed.token, *ends)
            output = await handler(input_protobuf_type.FromString(sealed.body), context)
            return pb.Sealed(token=key.proof(sealed.token, *ends), body=output.SerializeToString())

        async def answer_stream(requests: AsyncIterator[pb.Sealed], context: P2PContext) -> AsyncIterator[Any]:
            ends = name, context.remote_id, context.local_id
            first = await anext(requests, pb.Sealed())
            try:
                key.check_token(first.token, *ends)
            except LilliputError as e:
                yield RPCError(message=str(e))  # raised, it would fill the log
                return

            async def inputs() -> AsyncIterator[Any]:
                yield input_protobuf_type.FromString(first.body)
                async for sealed in requests:
                    yield input_protobuf_type.FromString(sealed.body)

            output = handler(inputs() if stream_input else await asingle(inputs()), context)
            outputs = output if stream_output else as_aiter(await output)
            proof = key.proof(first.token, *ends)
            async for part in outputs:
                yield pb.Sealed(token=proof, body=part.SerializeToString())
                proof = b""

        streams = stream_input or stream_output
        await super().add_protobuf_handler(
            name,
            answer_stream if streams else answer,
            pb.Sealed,
            stream_input=streams,
            stream_output=streams,
            balanced=balanced,
        )

    async def call_protobuf_handler(self, peer_id: PeerID, name: str, input: Any, output_protobuf_type: Any) -> Any:
        if isinstance(input, AsyncIterable):
            return await asingle(await self.iterate_protobuf_handler(peer_id, name, input, output_protobuf_type))
        token = self.key.token(name, self.peer_id, peer_id)
        sealed = pb.Sealed(token=token, body=input.SerializeToString())
        try:
            answer = await super().call_protobuf_handler(peer_id, name, sealed, pb.Sealed)
        except DecodeError as e:
            raise NotAMember(peer_id) from e
        self.key.check_proof(answer.token, token, name, self.peer_id, peer_id)
        return output_protobuf_type.FromString(answer.body)

    async def iterate_protobuf_handler(
        self, peer_id: PeerID, name: str, input: Any, output_protobuf_type: Any
    ) -> AsyncIterator[Any]:
        token = self.key.token(name, self.peer_id, peer_id)

        async def requests() -> AsyncIterator[pb.Sealed]:
            first = True
            async for part in input if isinstance(input, AsyncIterable) else as_aiter(input):
                yield pb.Sealed(token=token if first else b"", body=part.SerializeToString())
                first = False

        answers = await super().iterate_protobuf_handler(peer_id, name, requests(), pb.Sealed)

        async def outputs() -> AsyncIterator[Any]:
            first = True
            async for answer in answers:
                if first:
                    self.key.check_proof(answer.token, token, name, self.peer_id, peer_id)
                first = False
                yield output_protobuf_type.FromString(answer.body)

        return outputs()
