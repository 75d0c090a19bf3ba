"""hivemind's own calls, answered for every block: `rpc_info`, forward and backward.

The class has the name of hivemind's handler because the calls are named after it; so hivemind's `RemoteExpert`,
untouched, finds them. Unlike hivemind's, it lives on the server's event loop, in the server's process.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import AsyncIterator  # noqa: UP035 (hivemind reads the annotations and knows only this one)

import torch
from hivemind.compression import deserialize_tensor_stream, deserialize_torch_tensor, serialize_torch_tensor
from hivemind.p2p import P2PContext, ServicerBase
from hivemind.proto import runtime_pb2
from hivemind.utils import MSGPackSerializer
from hivemind.utils.streaming import split_for_streaming
from hivemind.utils.tensor_descr import DUMMY_BATCH_SIZE, BatchTensorDescriptor

from lilliput.engine.training import Pass
from lilliput.errors import BadRequest, LilliputError, WrongBlocks
from lilliput.models.sources import uid_prefix
from lilliput.server.service import Service
from lilliput.swarm.node import Node
from lilliput.wire import lilliput_pb2 as pb
from lilliput.wire.channel import Channel, Received, error_message
from lilliput.wire.limits import DEFAULT_LIMITS
from lilliput.wire.request_id import checked
from lilliput.wire.tensors import check_codec

logger = logging.getLogger(__name__)

#: streamed answers are cut into messages of this size
_PART_BYTES = 2 << 20
#: while a pass is computed, so often is looked whether its client is still there (seconds)
_LOOK_SECONDS = 0.5


class ConnectionHandler(ServicerBase):
    """Answers `RemoteExpert` for the blocks of one server. UIDs are `PREFIX.N`, N the block's number in the model."""

    def __init__(self, model: str, service: Callable[[], Service], node: Node) -> None:
        self._current, self._node = service, node
        self._prefix = uid_prefix(model)

    @property
    def _service(self) -> Service:
        return self._current()

    async def rpc_info(self, request: runtime_pb2.ExpertUID, context: P2PContext) -> runtime_pb2.ExpertInfo:
        self._block(request.uid)
        # hivemind checks how many tensors there are, not their shapes: rows and tokens are free
        sample = torch.empty(DUMMY_BATCH_SIZE, 1, self._service.span.hidden_size)
        schema = BatchTensorDescriptor.from_tensor(sample)
        info = {"forward_schema": ((schema,), {}), "outputs_schema": schema, "keyword_names": ()}
        return runtime_pb2.ExpertInfo(serialized_info=MSGPackSerializer.dumps(info))

    async def rpc_forward(self, request: runtime_pb2.ExpertRequest, context: P2PContext) -> runtime_pb2.ExpertResponse:
        tensors = [deserialize_torch_tensor(tensor) for tensor in request.tensors]
        return runtime_pb2.ExpertResponse(tensors=[await self._run(request.uid, tensors, context, backward=False)])

    async def rpc_backward(self, request: runtime_pb2.ExpertRequest, context: P2PContext) -> runtime_pb2.ExpertResponse:
        tensors = [deserialize_torch_tensor(tensor) for tensor in request.tensors]
        return runtime_pb2.ExpertResponse(tensors=[await self._run(request.uid, tensors, context, backward=True)])

    async def rpc_forward_stream(
        self, requests: AsyncIterator[runtime_pb2.ExpertRequest], context: P2PContext
    ) -> AsyncIterator[runtime_pb2.ExpertResponse]:
        async for part in self._run_stream(requests, context, backward=False):
            yield part

    async def rpc_backward_stream(
        self, requests: AsyncIterator[runtime_pb2.ExpertRequest], context: P2PContext
    ) -> AsyncIterator[runtime_pb2.ExpertResponse]:
        async for part in self._run_stream(requests, context, backward=True):
            yield part

    def _block(self, uid: str) -> int:
        prefix, _, number = uid.rpartition(".")
        if prefix != self._prefix or not number.isdecimal():
            span = self._service.span
            raise WrongBlocks(f"no block {uid!r} here; this server has {self._prefix}.{span.start} to .{span.end - 1}")
        self._service.check_blocks("", int(number), int(number) + 1)
        return int(number)

    async def _run(
        self, uid: str, tensors: list[torch.Tensor], context: P2PContext, *, backward: bool
    ) -> runtime_pb2.Tensor:
        block = self._block(uid)
        wanted = 2 if backward else 1
        if len(tensors) != wanted:
            raise BadRequest(
                f"{len(tensors)} tensors where {wanted} are due (inputs{', gradients' if backward else ''})"
            )
        await self._node.received(context.remote_id, sum(tensor.nbytes for tensor in tensors))
        job = Pass(block, block + 1, tensors[0], grad=tensors[1] if backward else None)
        # hivemind's uncompressed codec knows no bfloat16
        return serialize_torch_tensor((await self._service.run_pass(job, str(context.remote_id))).float())

    async def _run_stream(
        self, requests: AsyncIterator[runtime_pb2.ExpertRequest], context: P2PContext, *, backward: bool
    ) -> AsyncIterator[runtime_pb2.ExpertResponse]:
        uids: set[str] = set()
        left = DEFAULT_LIMITS.max_payload_bytes

        async def parts() -> AsyncIterator[list[runtime_pb2.Tensor]]:
            nonlocal left
            async for request in requests:
                left -= request.ByteSize()
                if left < 0:
                    raise BadRequest(f"more than {DEFAULT_LIMITS.max_payload_bytes} bytes in one request")
                uids.add(request.uid)
                yield list(request.tensors)

        tensors = await deserialize_tensor_stream(parts())
        if len(uids) != 1:
            raise BadRequest(f"a request names one block, not {len(uids)}")
        output = await self._run(uids.pop(), tensors, context, backward=backward)
        for part in split_for_streaming(output, _PART_BYTES):
            yield runtime_pb2.ExpertResponse(tensors=[part])


async def serve_passes(
    service: Callable[[], Service], channel: Channel, kind: str, peer: str, idle_seconds: float
) -> None:
    """`rpc_forward` and `rpc_backward` over a span: each message of `kind` is answered, until the stream ends.

    :param service: whose turn it is; raises why nobody's is
    """
    while (received := await channel.receive(within=idle_seconds)) is not None:
        try:
            if received.kind != kind:
                raise BadRequest(f"a {received.kind!r} message on a stream of {kind!r} messages")
            computing = asyncio.ensure_future(_pass(service(), received, peer))
            try:
                while not (computing.done() or channel.gone):
                    await asyncio.wait({computing}, timeout=_LOOK_SECONDS)
                if not computing.done():
                    return
                output, codec = computing.result()
            finally:
                computing.cancel()
        except LilliputError as e:
            await channel.send(error_message(e))
            continue
        name = "grad" if kind == "backward" else "hidden"
        await channel.send(pb.Message(output=pb.Output()), {name: output}, codec=codec)


async def _pass(service: Service, received: Received, peer: str) -> tuple[torch.Tensor, str]:
    body, tensors = received.body, received.tensors
    assert isinstance(body, pb.Forward | pb.Backward)
    service.check_blocks(body.model, body.start, body.end)
    service.span.check_adapter(body.adapter)
    codec, request_id = check_codec(body.codec), checked(body.request_id)
    needed = {"hidden", "grad"} if received.kind == "backward" else {"hidden"}
    if missing := needed - set(tensors):
        raise BadRequest(f"a {received.kind} message needs the tensors {', '.join(sorted(missing))}")
    if unknown := set(tensors) - needed - {"mask", "position_ids", "prompts"}:
        raise BadRequest(f"a {received.kind} message has no tensors named {', '.join(sorted(unknown))}")
    job = Pass(
        body.start,
        body.end,
        tensors["hidden"],
        grad=tensors["grad"] if received.kind == "backward" else None,
        mask=tensors.get("mask"),
        position_ids=tensors.get("position_ids"),
        prompts=tensors.get("prompts"),
        adapter=body.adapter,
    )
    begun, shape = time.monotonic(), tuple(tensors["hidden"].shape[:2])
    output = await service.run_pass(job, peer)
    logger.info(
        "%s of %s: %d x %d tokens through blocks %d:%d in %.2f s",
        *(received.kind, peer[-8:], *shape, body.start, body.end, time.monotonic() - begun),
        extra={"peer": peer, "request_id": request_id},
    )
    return output, codec
