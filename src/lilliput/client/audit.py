"""Whether servers that were asked the same have computed the same: pure functions of what they returned."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch

#: how far the outputs of two honest servers may be apart, by the coarser of their precisions (see `distance`). The
#: worst of 300 tokens through ten blocks of SmolLM2 was 0.0008 in float32, 0.053 in bfloat16 (with a cache of 8 bits),
#: 0.15 in int8, and 0.39 in 4 bits with weights that were not of 4 bits before; two of 4 bits may differ by more
_TOLERANCES = {"float32": 0.01, "float16": 0.1, "bfloat16": 0.1, "int8": 0.3, "int4": 0.7, "nf4": 0.7}
#: and what is added for how hidden states travel: 0.04 was the worst with int8
_CODEC_TOLERANCES = {"none": 0.0, "float16": 0.05, "bfloat16": 0.05, "int8": 0.15}
#: of a precision that is not known here
_OTHER = max(_TOLERANCES.values())
#: numbers are rounded as they are, not as they change: this share of a token's own length counts as change
_FLOOR = 0.01


@dataclass(frozen=True)
class Account:
    """What one server, or several that follow one another, made of the same hidden states.

    :ivar outputs: `[rows, tokens, hidden]`
    :ivar precisions: of the servers' weights, as they announce them
    """

    peers: tuple[str, ...]
    outputs: torch.Tensor
    precisions: tuple[str, ...]


@dataclass
class AuditCounts:
    """What came of a session's audits so far.

    :ivar agreed: others computed the same
    :ivar convicted: peers that others contradicted, in the order in which they were found out
    :ivar unable: nobody else could compute it, or what its server had been sent before was not kept
    """

    agreed: int = 0
    convicted: list[str] = field(default_factory=list)
    unable: int = 0


def judge(
    inputs: torch.Tensor, accounts: Sequence[Account], *, codec: str = "none", trusted: Collection[str] = ()
) -> list[int] | None:
    """Which of some accounts of the same `inputs` are wrong, by their numbers; None if that cannot be told.

    Peers that the caller trusts are believed, if they agree. Else the one is that most others agree with, and all who
    agree with that one are right; if as many agree with one of the rest, nobody knows.
    """

    def agree(one: Account, other: Account) -> bool:
        allowed = tolerance((*one.precisions, *other.precisions), codec)
        return distance(inputs, one.outputs, other.outputs) <= allowed

    everyone = range(len(accounts))
    agreeing = [{other for other in everyone if agree(accounts[one], accounts[other])} for one in everyone]
    believed = [one for one in everyone if set(accounts[one].peers) <= set(trusted)]
    if believed and set(believed) <= agreeing[believed[0]]:
        right = set().union(*(agreeing[one] for one in believed))
        return [one for one in everyone if one not in right]
    leader = max(everyone, key=lambda one: len(agreeing[one]))
    wrong = [one for one in everyone if one not in agreeing[leader]]
    return None if any(len(agreeing[one]) == len(agreeing[leader]) for one in wrong) else wrong


def distance(inputs: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> float:
    """How far two outputs are apart, as a share of what the blocks did to the inputs; of the worst token.

    A server that leaves its blocks out is at a distance of about 1. All are `[rows, tokens, hidden]`.
    """
    inputs, one, other = (tensor.to(torch.float64) for tensor in (inputs, one, other))
    apart = torch.linalg.vector_norm(one - other, dim=-1)
    change = torch.minimum(*(torch.linalg.vector_norm(outputs - inputs, dim=-1) for outputs in (one, other)))
    length = torch.linalg.vector_norm(inputs, dim=-1)
    return float((apart / (change + _FLOOR * length).clamp_min(1e-30)).max())


def tolerance(precisions: Sequence[str], codec: str = "none") -> float:
    """The distance that servers of these precisions may have."""
    return max(_TOLERANCES.get(precision, _OTHER) for precision in precisions) + _CODEC_TOLERANCES.get(codec, _OTHER)
