"""What has come for a session, before it is taken apart."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from lilliput.errors import BadRequest
from lilliput.wire import lilliput_pb2 as pb
from lilliput.wire.prefix import GRAIN, KEY_BYTES


@dataclass(frozen=True)
class Arrived:
    """A step that has come, and from whom.

    :ivar pushed: by another server, not sent by the client
    :ivar before: what the servers spent on it that it has passed
    :ivar at: when (`time.perf_counter`)
    """

    body: pb.Step
    tensors: Mapping[str, torch.Tensor]
    pushed: bool = False
    before: Sequence[pb.Timing] = ()
    at: float = field(default_factory=time.perf_counter)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def split_keys(data: bytes, rows: int) -> list[list[bytes]]:
    """[rows, n] page keys; empty if there are none."""
    if len(data) % (KEY_BYTES * rows):
        raise BadRequest(f"the page keys are not {rows} equal lists of {KEY_BYTES}-byte keys ({GRAIN} tokens each)")
    keys = [data[i : i + KEY_BYTES] for i in range(0, len(data), KEY_BYTES)]
    each = len(keys) // rows
    return [keys[i : i + each] for i in range(0, len(keys), each)] if each else []
