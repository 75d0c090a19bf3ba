"""Legs that a part of a step goes through in one message."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import torch

from lilliput.client.leg import Leg
from lilliput.client.server_session import Reply
from lilliput.client.step_trace import Crossing, HopTime
from lilliput.client.tape import Part
from lilliput.errors import Unreachable
from lilliput.wire import lilliput_pb2 as pb

#: no server has had a step for so long (milliseconds)
_MOST_MS = 1e9


class Run:
    """One leg, or several that follow one another: each server pushes its outputs to the next, the last one answers."""

    def __init__(self, legs: Sequence[Leg]) -> None:
        self.legs = list(legs)

    async def compute(self, part: Part) -> Reply:
        """Send a part to the first server; return what comes of it, and from whom. Raises nothing."""
        for leg, source in zip(self.legs, [None, *self.legs], strict=False):
            leg.sent, leg.fed_by = part.end, source
            leg.wake()
        for leg in self.legs:
            if leg.session.broken is not None:
                return Reply(leg.session, error=leg.session.broken)
        (first, *others), step_id = self.legs, next(self.legs[0].ids)
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        granted = min(leg.session.max_length for leg in self.legs)
        try:
            first.session.send(
                part.hidden,
                answer,
                step_id=step_id,
                position=part.begin,
                tensors=part.tensors(first.start, first.end),
                hashes=part.hashes,
                max_length=part.max_length if part.max_length > granted else 0,
                request_id=part.request_id,
                route=[pb.Next(peer=leg.hop.peer_id, push_key=leg.session.push_key) for leg in others],
            )
            for leg in others:
                leg.session.expect(answer, step_id=step_id, rows=part.rows, position=part.begin)
            reply = await answer
        finally:
            for leg in self.legs:
                leg.session.forget(step_id)
        if reply.hidden is None:
            return reply
        for leg, timing in zip(self.passed(reply)[:-1], reply.before, strict=False):
            leg.session.saw(step_id, timing)
        if (error := _wrong(reply.hidden, part)) is not None:
            return Reply(reply.session, error=Unreachable(f"server {reply.session.hop} returned {error}"))
        return replace(reply, hidden=reply.hidden.to(part.hidden.dtype))

    def crossing(self, reply: Reply, seconds: float) -> Crossing:
        """What is known about where the time until this reply went."""
        if reply.own is None:
            return Crossing(seconds, ())
        passed, own = self.passed(reply), reply.own
        timings = [*reply.before, *[pb.Timing()] * len(passed)][: len(passed) - 1]
        timings.append(pb.Timing(queued_ms=own.queued_ms, compute_ms=own.compute_ms))
        return Crossing(seconds, tuple(map(_hop_time, passed, timings)))

    def passed(self, reply: Reply) -> list[Leg]:
        """The legs up to the one that the reply is from."""
        sessions = [leg.session for leg in self.legs]
        return self.legs[: sessions.index(reply.session) + 1]


async def compute(leg: Leg, part: Part) -> torch.Tensor:
    """A part through one leg that nobody else uses meanwhile. Raises what went wrong."""
    async with leg.places:
        await leg.session.drain()
        reply = await Run([leg]).compute(part)
    if reply.hidden is None:
        assert reply.error is not None
        raise reply.error
    leg.answered = part.end
    leg.wake()
    return reply.hidden


def _hop_time(leg: Leg, spent: pb.Timing) -> HopTime:
    times = spent.queued_ms, spent.compute_ms, spent.there_and_back_ms
    seconds = (time / 1e3 if 0 <= time < _MOST_MS else 0.0 for time in times)  # servers may say what they like
    return HopTime(leg.hop.peer_id, leg.start, leg.end, *seconds)


def _wrong(hidden: torch.Tensor, part: Part) -> str | None:
    if hidden.shape != part.hidden.shape:
        return f"{list(hidden.shape)} for hidden states of {list(part.hidden.shape)}"
    if not bool(torch.isfinite(hidden).all()):
        return "what are not finite numbers"
    return None


def linked(first: Leg, second: Leg, part: Part) -> bool:
    """Whether the second leg can take a part right behind the first one, as far as the two sessions can tell."""
    return (
        second.takes(part.begin, first)
        and second.session.broken is None
        and second.session.pending == first.session.pending
        and second.hop.peer_id != first.hop.peer_id
    )
