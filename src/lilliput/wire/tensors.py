"""Tensors as bytes. A codec says how the numbers are packed; the sender names it beside each tensor.

    none       the tensor's own dtype
    float16    2 bytes a number
    bfloat16   2 bytes a number, float32's range
    int8       1 byte a number and one float32 scale per token (the largest magnitude in the last dimension becomes 127)

Codecs apply to floating-point tensors; integers travel as they are and booleans eight to a byte.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from lilliput.errors import BadRequest
from lilliput.wire import lilliput_pb2 as pb

CODECS = ("none", "float16", "bfloat16", "int8")

_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float64": torch.float64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "int32": torch.int32,
    "bool": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_CASTS = {"float16": torch.float16, "bfloat16": torch.bfloat16}
_MAX_DIMENSIONS = 4
_SCALE_BYTES = 4


def check_codec(codec: str) -> str:
    """Return `codec` ("" means none), or raise `BadRequest` naming the known ones."""
    codec = codec or "none"
    if codec not in CODECS:
        raise BadRequest(f"unknown codec {codec!r}; this peer knows {', '.join(CODECS)}")
    return codec


def encode(name: str, tensor: torch.Tensor, codec: str = "none") -> tuple[pb.Tensor, list[memoryview]]:
    """A tensor's header and its bytes, as buffers to be written one after another. No copy where none is needed."""
    tensor = tensor.detach()
    if tensor.device.type != "cpu":
        tensor = tensor.cpu()
    if tensor.dtype not in _NAMES:
        raise BadRequest(f"tensors of dtype {tensor.dtype} cannot be sent; known are {', '.join(_DTYPES)}")
    dtype, shape = _NAMES[tensor.dtype], list(tensor.shape)
    if not tensor.is_floating_point() or not tensor.dim() or not tensor.numel():
        codec = "none"
    if tensor.dtype == torch.bool:
        buffers = [_view(np.packbits(tensor.contiguous().numpy().reshape(-1)))]
    elif codec == "int8":
        wide = tensor.float()
        scale = wide.abs().amax(dim=-1, keepdim=True).div_(127)
        packed = wide.div(scale.clamp_min(torch.finfo(torch.float32).tiny)).round_().to(torch.int8)
        buffers = [_bytes_of(scale), _bytes_of(packed)]
    else:
        target = _CASTS.get(codec)
        if target is not None and target != tensor.dtype:
            if target == torch.float16:  # a large activation must arrive large, not infinite
                limit = torch.finfo(torch.float16).max
                tensor = tensor.clamp(-limit, limit)
            tensor = tensor.to(target)
        buffers = [_bytes_of(tensor)]
    nbytes = sum(buffer.nbytes for buffer in buffers)
    return pb.Tensor(name=name, dtype=dtype, shape=shape, codec=codec, nbytes=nbytes), buffers


def check_header(header: pb.Tensor) -> tuple[int, int]:
    """The bytes that a tensor's header announces, and those it will take in memory.

    Raises `BadRequest` if what it announces does not fit its shape, dtype and codec.
    """
    if header.dtype not in _DTYPES:
        raise BadRequest(f"tensor {header.name!r} has the unknown dtype {header.dtype!r}")
    codec = check_codec(header.codec)
    if len(header.shape) > _MAX_DIMENSIONS:
        raise BadRequest(
            f"tensor {header.name!r} has {len(header.shape)} dimensions; at most {_MAX_DIMENSIONS} are taken"
        )
    dtype, count = _DTYPES[header.dtype], math.prod(header.shape)
    if math.prod(max(size, 1) for size in header.shape) >= 1 << 62:
        raise BadRequest(f"no memory holds a tensor of shape {list(header.shape)}")
    if codec != "none" and not (dtype.is_floating_point and count and header.shape):
        raise BadRequest(f"the codec {codec} is no use for the {header.dtype} tensor of shape {list(header.shape)}")
    decoded = count * (torch.float32 if codec == "int8" else _CASTS.get(codec, dtype)).itemsize
    expected = decoded
    if dtype == torch.bool:
        expected = -(-count // 8)
    elif codec == "int8":
        expected = count + _SCALE_BYTES * (count // header.shape[-1])
    if expected != header.nbytes:
        raise BadRequest(
            f"tensor {header.name!r} of shape {list(header.shape)} in {codec} should be {expected} bytes, "
            f"but {header.nbytes} were announced"
        )
    return expected, decoded


def decode(header: pb.Tensor, data: bytes | bytearray | memoryview) -> torch.Tensor:
    """The tensor, writable and owning its memory.

    float16 and bfloat16 arrive in the codec's dtype (the receiver casts to its own anyway), int8 in float32.
    """
    shape = tuple(header.shape)
    dtype = _DTYPES[header.dtype]
    if dtype == torch.bool:
        bits = np.unpackbits(np.frombuffer(data, np.uint8), count=math.prod(shape))
        return torch.from_numpy(bits.view(np.bool_)).view(shape)
    codec = header.codec or "none"
    if codec == "int8":
        scale_shape = (*shape[:-1], 1)
        split = _SCALE_BYTES * math.prod(scale_shape)
        view = memoryview(data)
        scale = _tensor_of(view[:split], torch.float32, scale_shape)
        return _tensor_of(view[split:], torch.int8, shape).float().mul_(scale)
    return _tensor_of(data, _CASTS.get(codec, dtype), shape)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.contiguous().view(-1)
    return _view(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")


def _view(array: np.ndarray) -> memoryview:
    return memoryview(array)  # type: ignore[arg-type]  # numpy's annotations do not say that arrays are buffers


def _tensor_of(data: bytes | bytearray | memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    out = torch.empty(shape, dtype=dtype)
    if out.numel():
        out.view(-1).view(torch.uint8).numpy()[:] = np.frombuffer(data, np.uint8)
    return out
