"""One raw p2p stream that carries whole messages both ways.

A message is written once and read once: a four-byte length, the protobuf header, then the tensors' raw bytes in the
order in which the header lists them.

Raw streams, not hivemind's protobuf streams, because only they report at once that the peer is gone
(`receive` returns None).
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from google.protobuf.message import DecodeError

from lilliput.errors import BadRequest, Busy, LilliputError, Unreachable, from_code
from lilliput.wire import lilliput_pb2 as pb
from lilliput.wire.limits import DEFAULT_LIMITS, Limits
from lilliput.wire.tensors import check_header, decode, encode

_LENGTH = struct.Struct("!I")
#: messages below this size are joined into one write: one system call, one packet
_JOIN_BELOW = 1 << 16
_WRITE_CHUNK = 1 << 18


@dataclass(frozen=True)
class Received:
    """A message as it arrived: its kind ("open", "step", ...), its body, its tensors by name."""

    kind: str
    body: object
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)


class Channel:
    """Whole messages over one stream. Not safe for several senders or several receivers at once.

    :param reader, writer: a stream as hivemind's `P2P` hands it out
    :param peer: who is at the other end, for error messages
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        peer: str = "the peer",
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self._reader, self._writer = reader, writer
        self.peer, self.limits = peer, limits

    async def send(
        self, message: pb.Message, tensors: Mapping[str, torch.Tensor] | None = None, *, codec: str = "none"
    ) -> None:
        """Send one message. Raises `Unreachable` if the stream is broken."""
        buffers: list[memoryview] = []
        for name, tensor in (tensors or {}).items():
            header, parts = encode(name, tensor, codec)
            message.tensors.append(header)
            buffers.extend(parts)
        head = message.SerializeToString()
        head = _LENGTH.pack(len(head)) + head
        try:
            if len(head) + sum(buffer.nbytes for buffer in buffers) <= _JOIN_BELOW:
                self._writer.write(b"".join([head, *buffers]))
            else:
                self._writer.write(head)
                for buffer in buffers:
                    for offset in range(0, buffer.nbytes, _WRITE_CHUNK):
                        self._writer.write(buffer[offset : offset + _WRITE_CHUNK])
                        await self._writer.drain()
            await self._writer.drain()
        except (OSError, RuntimeError) as e:
            raise Unreachable(f"the connection to {self.peer} broke while sending", self.peer) from e

    async def receive(self) -> Received | None:
        """The next message, or None when the peer closed the stream or died.

        Raises `BadRequest` for bytes that are no message; after that the stream is out of step and must be closed.
        """
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            if length > self.limits.max_header_bytes:
                raise BadRequest(f"not a message: a header of {length} bytes (at most {self.limits.max_header_bytes})")
            message = pb.Message.FromString(await self._reader.readexactly(length))
            headers = list(message.tensors)
            if len(headers) > self.limits.max_tensors:
                raise BadRequest(f"{len(headers)} tensors in one message (at most {self.limits.max_tensors})")
            total = sum(check_header(header) for header in headers)
            if total > self.limits.max_payload_bytes:
                raise BadRequest(
                    f"{total} bytes of tensors in one message (at most {self.limits.max_payload_bytes}); "
                    "send the tokens in several steps"
                )
            tensors = {header.name: decode(header, await self._reader.readexactly(header.nbytes)) for header in headers}
        except (asyncio.IncompleteReadError, OSError):
            return None
        except DecodeError as e:
            raise BadRequest(f"not a message of this protocol: {e}") from e
        kind = message.WhichOneof("body")
        if kind is None:
            raise BadRequest("an empty message")
        return Received(kind, getattr(message, kind), tensors)

    async def expect(self, kind: str) -> Received:
        """The next message, which must be of this kind. A reported error is raised as the error it names."""
        received = await self.receive()
        if received is None:
            raise Unreachable(f"{self.peer} closed the connection", self.peer)
        if received.kind == "error":
            raise error_of(received.body)  # type: ignore[arg-type]
        if received.kind != kind:
            raise Unreachable(f"{self.peer} answered {received.kind!r} where {kind!r} was due", self.peer)
        return received

    def close(self) -> None:
        """Close the stream; the peer's `receive` returns None. May be called twice."""
        with contextlib.suppress(Exception):
            self._writer.close()


def error_message(error: LilliputError, *, step_id: int = 0, closed: bool = False) -> pb.Message:
    """The message that reports `error` to the peer."""
    body = pb.Error(
        code=pb.ErrorCode.Value(error.code),
        text=str(error),
        retry_elsewhere=error.retry_elsewhere,
        step_id=step_id,
        closed=closed,
    )
    if isinstance(error, Busy):
        body.wait_seconds = error.wait_seconds or 0.0
        body.queue_length = error.queue_length or 0
    return pb.Message(error=body)


def error_of(body: pb.Error) -> LilliputError:
    """The error that a peer's message reports."""
    code = pb.ErrorCode.Name(body.code) if body.code in pb.ErrorCode.values() else "INTERNAL"
    if code == "BUSY":
        return Busy(body.text, body.wait_seconds or None, body.queue_length or None)
    return from_code(code, body.text)
