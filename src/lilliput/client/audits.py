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

from lilliput.client.audit import Account, AuditCounts, judge
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
#: so many are asked about one part, if those before do not agree
_MOST_ASKED = 7


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
        accounts, wrong = [_account([leg.hop], outputs)], None
        async with self._turn:
            if not chain.tape.seen(leg.start, part.end):
                self.counts.unable += 1
                return
            while wrong is None and len(accounts) <= _MOST_ASKED:
                try:
                    accounts.append(await self._compute(leg, part, {peer for one in accounts for peer in one.peers}))
                except LilliputError as e:
                    logger.info("nobody else could audit %s: %s", leg.hop, e)
                    break
                wrong = judge(part.hidden, accounts, codec=remote.codec, trusted=remote.trusted_peers or ())
            if len(accounts) == 1:
                self.counts.unable += 1
            else:
                self._act(leg, accounts, wrong)

    def _act(self, leg: Leg, accounts: Sequence[Account], wrong: list[int] | None) -> None:
        blocks = f"blocks {leg.start}:{leg.end}"
        if wrong is None:
            peers = tuple(peer for account in accounts for peer in account.peers)
            raise Disputed(
                f"servers {' and '.join(peer[-8:] for peer in peers)} compute something else for {blocks} from the "
                "same hidden states, and nobody else can tell who is right; another server of these blocks could, or "
                "name one of them as trusted",
                peers,
            )
        for number in wrong:
            if len(accounts[number].peers) == 1:  # of several, who knows which
                self._convict(accounts[number].peers[0], blocks)
        if 0 in wrong:
            error = WrongAnswer(f"server {leg.hop}: others compute something else from the same hidden states")
            raise Convicted(leg, error)
        self.counts.agreed += 1

    def _convict(self, peer_id: str, blocks: str) -> None:
        self._chain.remote.connection.convict(peer_id)
        self.counts.convicted.append(peer_id)
        logger.warning(
            "server %s computes something else for %s than others do; it is not used any more", peer_id[-8:], blocks
        )

    # -- what others make of it

    async def _compute(self, leg: Leg, part: Part, asked: set[str]) -> Account:
        """What somebody who was not asked yet makes of a part that a leg was sent. Raises `MissingBlocks`."""
        asked = set(asked)
        while True:
            hops = await self._somebody(leg, asked)
            try:
                return await self._ask(hops, part)
            except LilliputError as e:
                logger.info("an audit by %s failed: %s", " and ".join(map(str, hops)), e)
                asked.update(hop.peer_id for hop in hops)

    async def _ask(self, hops: list[Hop], part: Part) -> Account:
        chain = self._chain
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
