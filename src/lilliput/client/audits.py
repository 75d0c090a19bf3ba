"""Now and then, what a server of a chain returned is computed once more by another one.

An audited chain is carried, never pushed, and names no pages of its servers' caches. So every server has been sent what
is on the tape and nothing else, whatever others made of it before: two that are sent the same from position 0 on and
return something else cannot both be honest, and none can tell a step that is audited from one that is not.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from lilliput.client.audit import Account, AuditCounts, Verdict, judge
from lilliput.client.history import TokenHistory, for_all_rows
from lilliput.client.leg import Leg, close_legs
from lilliput.client.route import Hop, usable
from lilliput.client.run import compute
from lilliput.client.tape import Part
from lilliput.client.tasks import all_of
from lilliput.errors import Disputed, LilliputError, WrongAnswer

if TYPE_CHECKING:
    from lilliput.client.chain import Chain

logger = logging.getLogger(__name__)

_chance = random.SystemRandom()


class Convicted(Exception):
    """A leg's server was found out. What it returned, and what came of that, is worth nothing."""

    def __init__(self, leg: Leg, error: WrongAnswer) -> None:
        super().__init__(str(error))
        self.leg, self.error = leg, error


class Audits:
    """Of one chain. Belongs to it.

    They go on while a step does, one at a time; the step's outputs are handed out when all have ended.
    """

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        self._running: list[asyncio.Task[None]] = []
        self._turn = asyncio.Lock()
        self._secret = secrets.token_bytes(16)
        self.counts = AuditCounts()

    def check(self, legs: Sequence[Leg]) -> None:
        """Raise `Convicted` for a leg whose server another session has found out."""
        if self._chain.remote.audit:
            for leg in legs:
                if leg.hop.peer_id in self._chain.remote.connection.convicted:
                    raise Convicted(leg, WrongAnswer(f"server {leg.hop} was found out in another session"))

    def draw(self, leg: Leg, part: Part, outputs: torch.Tensor) -> None:
        """A server has returned `outputs` for a part: leave it to chance whether that is looked at."""
        share = self._chain.remote.audit
        if share and share > _chance.random():
            self._running.append(asyncio.create_task(self._audit(leg, part, outputs)))

    async def settle(self) -> None:
        """Wait for what came of the step's audits. Raises `Convicted`, or `Disputed`."""
        if self._running:
            running, self._running = self._running, []
            await all_of(running)

    def give_up(self) -> None:
        """The step has failed."""
        for task in self._running:
            task.cancel()
        self._running = []

    async def _audit(self, leg: Leg, part: Part, outputs: torch.Tensor) -> None:
        chain, remote = self._chain, self._chain.remote
        first = _account([leg.hop], outputs)
        async with self._turn:
            if not chain.tape.seen(leg.start, part.end):
                self.counts.unable += 1
                return
            try:
                second = await self._compute(leg, part, {leg.hop.peer_id})
            except LilliputError as e:
                self.counts.unable += 1
                logger.info("nobody could audit %s: %s", leg.hop, e)
                return
            third, trusted = None, remote.trusted_peers or ()
            verdict = judge(part.hidden, first, second, codec=remote.codec, trusted=trusted)
            if verdict is Verdict.UNDECIDED:
                try:
                    third = await self._compute(leg, part, {*first.peers, *second.peers})
                except LilliputError as e:
                    logger.info("nobody could settle who is right about blocks %d:%d: %s", leg.start, leg.end, e)
                verdict = judge(part.hidden, first, second, third, codec=remote.codec, trusted=trusted)
            self._act(leg, verdict, first, second)

    def _act(self, leg: Leg, verdict: Verdict, first: Account, second: Account) -> None:
        blocks, others = f"{leg.start}:{leg.end}", " and ".join(peer[-8:] for peer in second.peers)
        if verdict is Verdict.UNDECIDED:
            raise Disputed(
                f"servers {leg.hop.peer_id[-8:]} and {others} compute something else for blocks {blocks} from the "
                "same hidden states, and nobody else can tell who is right; a third server of these blocks could, or "
                "name one of them as trusted",
                (*first.peers, *second.peers),
            )
        if verdict is Verdict.FIRST_WRONG:
            error = WrongAnswer(f"server {leg.hop}: others compute something else from the same hidden states")
            self._convict(leg.hop.peer_id, str(error))
            raise Convicted(leg, error)
        self.counts.agreed += 1
        if verdict is Verdict.SECOND_WRONG and len(second.peers) == 1:  # of several, who knows which
            self._convict(second.peers[0], f"server {others} contradicts two others about blocks {blocks}")

    def _convict(self, peer_id: str, why: str) -> None:
        self._chain.remote.connection.convict(peer_id)
        self.counts.convicted.append(peer_id)
        logger.warning("%s; it is not used any more", why)

    # -- what others make of it

    async def _compute(self, leg: Leg, part: Part, asked: set[str]) -> Account:
        """What somebody who was not asked yet makes of a part that a leg was sent. Raises what chains do."""
        chain = self._chain
        hops = await self._somebody(leg, asked)
        names = self._names(part.begin)
        prefix = for_all_rows(names.keys(0, part.begin, part.rows), part.rows, chain.max_rows)
        patience = replace(chain.remote.patience, queue=0.0)
        legs = await chain.open_legs(hops, prefix, set(), patience, max_length=part.end)
        try:
            await chain.replay.feed(legs, part.begin, names=names)
            for other in legs:
                part = replace(part, hidden=await compute(other, part), max_length=0)
            return _account(hops, part.hidden)
        finally:
            await close_legs(legs)

    async def _somebody(self, leg: Leg, asked: set[str]) -> list[Hop]:
        """One of those who hold all of the leg's blocks, by chance; else several who do together."""
        chain = self._chain
        records = await chain.remote.connection.records(chain.remote.name)
        able = [r.peer_id for r in records if usable(r, asked) and r.start <= leg.start and leg.end <= r.end]
        if able:
            others = set(able) - {_chance.choice(able)}
            try:
                return await chain.hops(leg.start, leg.end, asked | others)
            except LilliputError:  # that one may not, or has not what is asked for
                pass
        return await chain.hops(leg.start, leg.end, asked)

    def _names(self, length: int) -> TokenHistory:
        """What the caches of audits are found by: not tokens, but the very entries of the tape."""
        mark = self._chain.tape.mark()
        names = TokenHistory(self._secret + mark.numbering.to_bytes(8, "big"))
        names.append(mark.slots[:, :length])
        return names


def _account(hops: list[Hop], outputs: torch.Tensor) -> Account:
    return Account(tuple(hop.peer_id for hop in hops), outputs, tuple(hop.record.dtype for hop in hops))
