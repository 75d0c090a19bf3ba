"""Tensors as bytes and back, and headers that lie."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lilliput.errors import BadRequest
from lilliput.wire import lilliput_pb2 as pb
from lilliput.wire.tensors import CODECS, check_codec, check_header, decode, encode

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool]
#: the largest error of one number, relative to the largest of its token
TOLERANCES = {"none": 0.0, "float16": 2**-11, "bfloat16": 2**-8, "int8": 0.5 / 127 + 1e-6}


def there_and_back(tensor: torch.Tensor, codec: str = "none") -> torch.Tensor:
    header, buffers = encode("x", tensor, codec)
    data = b"".join(buffers)
    assert check_header(header)[0] == header.nbytes == len(data)
    decoded = decode(header, data)
    assert check_header(header)[1] == decoded.numel() * decoded.itemsize
    assert decoded.shape == tensor.shape
    return decoded


@given(
    shape=st.lists(st.integers(0, 5), max_size=4),
    dtype=st.sampled_from(DTYPES),
    codec=st.sampled_from(CODECS),
    seed=st.integers(0, 1000),
)
def test_every_shape_dtype_and_codec(shape: list[int], dtype: torch.dtype, codec: str, seed: int) -> None:
    tensor = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 9).to(dtype)
    got = there_and_back(tensor, codec)
    if not dtype.is_floating_point:
        assert got.dtype == dtype
        assert torch.equal(got, tensor)
    elif tensor.numel() and shape:
        error = (got.double() - tensor.double()).abs()
        largest = tensor.double().abs().amax(dim=-1, keepdim=True)
        assert bool((error <= largest * TOLERANCES[codec] * 1.01 + 1e-7).all())


@pytest.mark.parametrize("codec", CODECS)
def test_what_is_not_contiguous_or_all_zero(codec: str) -> None:
    tensor = torch.randn(6, 4, 8).transpose(0, 1)[:, ::2]
    assert torch.allclose(there_and_back(tensor, codec).float(), tensor, atol=0.03)
    assert torch.equal(there_and_back(torch.zeros(2, 3), codec).float(), torch.zeros(2, 3))


def test_what_is_too_large_for_float16_arrives_large() -> None:
    got = there_and_back(torch.tensor([1e30, -1e30, 3.0]), "float16")
    assert got.tolist() == [65504.0, -65504.0, 3.0]


def test_the_receiver_owns_what_it_got() -> None:
    header, buffers = encode("x", torch.ones(3))
    got = decode(header, b"".join(buffers))
    got += 1
    assert got.tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    "fields",
    [
        {"dtype": "float8"},
        {"dtype": ""},
        {"codec": "zip"},
        {"nbytes": 23},
        {"nbytes": 0},
        {"nbytes": (1 << 64) - 1},
        {"shape": [1, 1, 1, 1, 6]},
        {"shape": [(1 << 32) - 1] * 4, "nbytes": 0},
        {"shape": [(1 << 32) - 1] * 3 + [0], "nbytes": 0},
        {"shape": [0, 0], "nbytes": 0, "codec": "int8"},
        {"shape": [], "nbytes": 5, "codec": "int8"},
        {"dtype": "int64", "codec": "float16", "nbytes": 12},
        {"dtype": "bool", "codec": "int8", "nbytes": 1},
    ],
)
def test_headers_that_make_no_sense(fields: dict[str, object]) -> None:
    good = {"name": "x", "dtype": "float32", "shape": [2, 3], "codec": "none", "nbytes": 24}
    check_header(pb.Tensor(**good))  # type: ignore[arg-type]
    with pytest.raises(BadRequest):
        check_header(pb.Tensor(**{**good, **fields}))  # type: ignore[arg-type]


@given(
    shape=st.lists(st.sampled_from([0, 1, 2, 3, 7, 1 << 16, (1 << 32) - 1]), max_size=5),
    dtype=st.sampled_from(["float32", "bfloat16", "int64", "bool", "complex64"]),
    codec=st.sampled_from(["", *CODECS]),
)
def test_what_passes_the_check_can_be_decoded(shape: list[int], dtype: str, codec: str) -> None:
    header = pb.Tensor(name="x", dtype=dtype, shape=shape, codec=codec)
    try:
        check_header(header)
    except BadRequest as e:
        words = str(e).split()
        if "should" not in words:
            return
        header.nbytes = int(words[words.index("be") + 1])
    wire, memory = check_header(header)
    if memory < 1 << 20:
        got = decode(header, bytes(wire))
        assert got.numel() * got.itemsize == memory


def test_codecs_have_names() -> None:
    assert check_codec("") == "none"
    with pytest.raises(BadRequest, match="bfloat16"):
        check_codec("zip")
