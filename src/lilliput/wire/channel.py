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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from google.protobuf.message import DecodeError

from lilliput.errors import BadRequest, Busy, LilliputError, Unreachable, from_code
from lilliput.wire import lilliput_pb2 as pb
from lilliput.wire.limits import DEFAULT_LIMITS, Limits
from lilliput.wire.tensors import check_header, decode, encode

_LENGTH = struct.Struct("!I")
#: what is smaller is copied into a common write, what is larger is written as it lies
_JOIN_BELOW = 1 << 16
#: with more than this waiting, senders wait
_CONGESTED_BYTES = 1 << 20
_READ_CHUNK = 1 << 18
#: what a closed stream could not get rid of after this long is given up (seconds)
_LINGER_SECONDS = 10.0
#: so long a peer has to read our last words (seconds)
_HEAR_OUT_SECONDS = 5.0
#: what a message costs beside its bytes, in bytes
_MESSAGE_BYTES = 1 << 10
#: an error may quote what the peer sent, but not at length
_MAX_ERROR_TEXT = 2000


@dataclass(frozen=True)
class Received:
    """A message as it arrived: its kind ("open", "step", ...), its body, its tensors by name, its session's number."""

    kind: str
    body: object
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    session: int = 0


class Channel:
    """Whole messages over one stream. Several tasks may send; one receives.

    :param reader, writer: a stream as hivemind's `P2P` hands it out
    :param peer: who is at the other end, for error messages
    :ivar pace: told how many bytes have come, it says how many seconds to wait before more are read
    :ivar arriving: while a long message arrives: when its last bytes did (the loop's time); 0 otherwise
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
        self._outgoing: list[bytes | memoryview] = []
        self._flushing: asyncio.Handle | None = None
        self.pace: Callable[[int], float] | None = None
        self.arriving = 0.0

    def post(
        self, message: pb.Message, tensors: Mapping[str, torch.Tensor] | None = None, *, codec: str = "none"
    ) -> None:
        """Write one message at the end of this turn of the loop, joined with whatever else is posted until then.

        Messages of several tasks never mix. Nothing is raised if the peer is gone: `receive` tells.
        """
        buffers: list[memoryview] = []
        for name, tensor in (tensors or {}).items():
            header, parts = encode(name, tensor, codec)
            message.tensors.append(header)
            buffers.extend(parts)
        head = message.SerializeToString()
        self._outgoing.append(_LENGTH.pack(len(head)) + head)
        self._outgoing.extend(buffers)
        if self._flushing is None:
            self._flushing = asyncio.get_running_loop().call_soon(self._flush)

    async def send(
        self, message: pb.Message, tensors: Mapping[str, torch.Tensor] | None = None, *, codec: str = "none"
    ) -> None:
        """Post one message; if much waits to be sent, wait until it is. Raises `Unreachable` if the stream broke."""
        if self._writer.is_closing():
            raise Unreachable(f"the connection to {self.peer} is closed", self.peer)
        self.post(message, tensors, codec=codec)
        await self.drain()

    @property
    def unsent(self) -> int:
        """Bytes that wait to be sent."""
        return sum(len(part) for part in self._outgoing) + self._writer.transport.get_write_buffer_size()

    @property
    def congested(self) -> bool:
        """Whether more waits to be sent than should."""
        return self.unsent > _CONGESTED_BYTES

    @property
    def gone(self) -> bool:
        """Whether the peer has closed the stream or died, and all that it sent was received."""
        return self._reader.at_eof() or self._writer.is_closing()

    async def drain(self) -> None:
        """Wait while the channel is congested. Raises `Unreachable` if the stream is broken."""
        if not self.congested:
            return
        self._flush()
        try:
            await self._writer.drain()
        except (OSError, RuntimeError) as e:
            raise Unreachable(f"the connection to {self.peer} broke while sending", self.peer) from e

    def _flush(self) -> None:
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        parts, self._outgoing = self._outgoing, []
        small: list[bytes | memoryview] = []
        with contextlib.suppress(OSError, RuntimeError):  # the peer is gone; the reader will tell
            for part in parts:
                if len(part) < _JOIN_BELOW:  # one write, one system call, one packet
                    small.append(part)
                    continue
                if small:
                    self._writer.write(b"".join(small))
                    small = []
                self._writer.write(part)
            if small:
                self._writer.write(b"".join(small))

    async def receive(self, *, within: float | None = None) -> Received | None:
        """The next message, or None when the peer closed the stream, died, or sent nothing for `within` seconds.

        An error that ends the stream as a whole closes it on this side, too: the peer waits for that (`hear_out`).
        Raises `BadRequest` for bytes that are no message; after that the stream is out of step and must be closed.
        """
        try:
            (length,) = _LENGTH.unpack(await self._read(_LENGTH.size, within))
            if length > self.limits.max_header_bytes:
                raise BadRequest(f"not a message: a header of {length} bytes (at most {self.limits.max_header_bytes})")
            message = pb.Message.FromString(bytes(await self._read(length, within)))
            headers = list(message.tensors)
            if len(headers) > self.limits.max_tensors:
                raise BadRequest(f"{len(headers)} tensors in one message (at most {self.limits.max_tensors})")
            # few bytes may become many: booleans travel eight to a byte
            total = max(map(sum, zip(*map(check_header, headers), strict=True)), default=0)
            if total > self.limits.max_payload_bytes:
                raise BadRequest(
                    f"{total} bytes of tensors in one message (at most {self.limits.max_payload_bytes}); "
                    "send the tokens in several steps"
                )
            tensors = {header.name: decode(header, await self._read(header.nbytes, within)) for header in headers}
            short = sum(header.nbytes for header in headers if header.nbytes <= _READ_CHUNK)
            await self._keep_pace(_MESSAGE_BYTES + length + short)
        except (asyncio.IncompleteReadError, OSError):
            return None
        except DecodeError as e:
            raise BadRequest(f"not a message of this protocol: {e}") from e
        finally:
            self.arriving = 0.0
        kind = message.WhichOneof("body")
        if kind is None:
            raise BadRequest("an empty message")
        if kind == "error" and message.error.closed and not message.session:
            self.close()
        return Received(kind, getattr(message, kind), tensors, message.session)

    async def _read(self, count: int, within: float | None) -> bytes | bytearray:
        if count <= _READ_CHUNK:
            async with asyncio.timeout(within):
                return await self._reader.readexactly(count)
        data, loop = bytearray(), asyncio.get_running_loop()
        while len(data) < count:
            chunk = await self._read(min(_READ_CHUNK, count - len(data)), within)
            data += chunk
            self.arriving = loop.time()
            await self._keep_pace(len(chunk))
        return data

    async def _keep_pace(self, count: int) -> None:
        if self.pace is not None and (wait := self.pace(count)):
            await asyncio.sleep(wait)

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

    async def hear_out(self) -> None:
        """Between our last words and `close`: throw away what the peer sends, until it has read them and closes.

        If we closed first, what it sends meanwhile would find nobody, and the p2p daemons would drop the stream with
        all that they have not passed on yet.
        """
        with contextlib.suppress(OSError, RuntimeError, TimeoutError):
            async with asyncio.timeout(_HEAR_OUT_SECONDS):
                while await self._reader.read(_READ_CHUNK):  # noqa: ASYNC110
                    await asyncio.sleep(0)  # it may send faster than this reads

    def close(self) -> None:
        """Close the stream; the peer's `receive` returns None. May be called twice.

        What waits to be sent still is, unless the peer does not take it.
        """
        self._flush()
        with contextlib.suppress(Exception):
            self._writer.close()
            if self.unsent:
                asyncio.get_running_loop().call_later(_LINGER_SECONDS, self._writer.transport.abort)


def error_message(error: LilliputError, *, step_id: int = 0, closed: bool = False, session: int = 0) -> pb.Message:
    """The message that reports `error` to the peer."""
    body = pb.Error(
        code=pb.ErrorCode.Value(error.code),
        text=str(error)[:_MAX_ERROR_TEXT],
        retry_elsewhere=error.retry_elsewhere,
        step_id=step_id,
        closed=closed,
    )
    if isinstance(error, Busy):
        body.wait_seconds = error.wait_seconds or 0.0
        body.queue_length = error.queue_length or 0
    return pb.Message(error=body, session=session)


def error_of(body: pb.Error) -> LilliputError:
    """The error that a peer's message reports."""
    code = pb.ErrorCode.Name(body.code) if body.code in pb.ErrorCode.values() else "INTERNAL"
    if code == "BUSY":
        return Busy(body.text, body.wait_seconds or None, body.queue_length or None)
    return from_code(code, body.text)
