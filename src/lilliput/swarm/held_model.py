"""Who holds what of a model: a pure function of what its servers announce, for everyone who shows it."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mode
from typing import Any

from lilliput.swarm.records import ServerRecord


@dataclass(frozen=True)
class HeldModel:
    """A model, and who holds what of it, as somebody sees it.

    :ivar blocks: of the whole model
    :ivar round_trips: seconds to servers and back, by peer id, as far as somebody measured; None: no answer
    :ivar fingerprint: of the files that count; servers of others are shown, but serve nothing. Empty: all count.
    :ivar failed: peers that failed somebody lately, and are passed over
    """

    name: str
    blocks: int
    servers: Sequence[ServerRecord]
    round_trips: Mapping[str, float | None] = field(default_factory=dict)
    fingerprint: str = ""
    failed: Collection[str] = ()

    @classmethod
    def announced(
        cls, name: str, servers: Sequence[ServerRecord], hint: int, round_trips: Mapping[str, float | None]
    ) -> HeldModel:
        """With as many blocks as most of the servers say; without servers, as many as `hint`."""
        blocks = mode(server.model_blocks or server.end for server in servers) if servers else hint
        return cls(name, blocks, servers, round_trips)

    def serves(self, server: ServerRecord) -> bool:
        """Whether its blocks can be used now."""
        return server.state == "serving" and server.peer_id not in self.failed and self._same_files(server)

    def coverage(self) -> list[int]:
        """For each block, how many servers serve it."""
        changes = [0] * (self.blocks + 1)
        for server in filter(self.serves, self.servers):
            changes[min(server.start, self.blocks)] += 1
            changes[min(server.end, self.blocks)] -= 1
        return list(itertools.accumulate(changes[:-1]))

    def missing(self) -> list[tuple[int, int]]:
        """Spans that nobody serves."""
        spans, block = [], 0
        for held, run in itertools.groupby(self.coverage(), key=bool):
            start, block = block, block + len(list(run))
            if not held:
                spans.append((start, block))
        return spans

    def facts(self) -> dict[str, Any]:
        """All of it, for programs. Of each server what it announces, and

        - `serves`: whether its blocks count
        - `other_files`: it holds another model under this name
        - `failed`: it failed us lately
        - `round_trip_ms`: to it and back; null: not measured, or (`silent`) it did not answer
        """
        return {
            "model": self.name,
            "blocks": self.blocks,
            "missing": self.missing(),
            "coverage": self.coverage(),
            "servers": [self._facts_of(server) for server in self.servers],
        }

    def _facts_of(self, server: ServerRecord) -> dict[str, Any]:
        took = self.round_trips.get(server.peer_id)
        return {
            **server.model_dump(mode="json", exclude={"model"}),
            "serves": self.serves(server),
            "other_files": not self._same_files(server),
            "failed": server.peer_id in self.failed,
            "round_trip_ms": None if took is None else round(took * 1e3, 2),
            "silent": took is None and server.peer_id in self.round_trips,
        }

    def _same_files(self, server: ServerRecord) -> bool:
        return not self.fingerprint or not server.fingerprint or server.fingerprint == self.fingerprint
