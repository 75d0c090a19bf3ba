"""Which remote model, reached how: what sessions and remote blocks have in common."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from hivemind.p2p import PeerID

from lilliput.client.connection import Connection, Patience
from lilliput.client.costs import SESSION, Use
from lilliput.client.route import Guard, Hop, missing_blocks, usable
from lilliput.errors import BadRequest
from lilliput.wire.request_id import checked
from lilliput.wire.tensors import check_codec

#: by default no other process can name the prefixes of this one
_PROCESS_SECRET = secrets.token_bytes(16)
REPLAY_BYTES = 256 << 20


@dataclass(frozen=True)
class RemoteModel:
    """A model in a swarm, as one client uses it.

    :param name: under which the servers announce it
    :param blocks: how many it has
    :param fingerprint: of the client's own files; servers of other weights are not used. Empty: any.
    :param codec: how hidden states travel, both ways: none, float16, bfloat16, int8
    :param push: servers send outputs straight to the next server, where they can reach it
    :param prefix_secret: clients that share it (and a server's trust) share cached prefixes; None keeps them private
    """

    connection: Connection
    name: str
    blocks: int
    fingerprint: str = ""
    adapter: str = ""
    codec: str = "none"
    patience: Patience = field(default_factory=Patience)
    prefix_secret: str | None = None
    #: of each session, for hidden states between servers that are kept in case that one of them fails
    replay_bytes: int = REPLAY_BYTES
    push: bool = True
    #: peers that alone may compute the ends of the model, where text can be read (see `route.Guard`); None: any may
    trusted_peers: frozenset[str] | None = None
    #: the share of what each server returns that is computed once more by another one; more than 0 needs `push=False`
    audit: float = 0.0
    #: for the servers' logs, of what brings no id of its own
    request_id: str = ""

    def __post_init__(self) -> None:
        check_codec(self.codec)
        checked(self.request_id)
        if not 0 <= self.audit <= 1:
            raise BadRequest(f"audit is a share of what servers return, from 0 to 1, not {self.audit}")
        if self.audit and self.push:
            raise BadRequest("what servers push to one another cannot be audited: audit needs push=False")

    @property
    def salt(self) -> bytes | None:
        """What the keys of this model's prefixes begin with; None if they have no keys."""
        if self.audit:
            return None  # what servers computed in other sessions may have come of a lie
        secret = _PROCESS_SECRET if self.prefix_secret is None else self.prefix_secret.encode()
        parts = (self.name.encode(), self.fingerprint.encode(), self.adapter.encode(), secret)
        return hashlib.blake2b(b"".join(len(part).to_bytes(4, "big") + part for part in parts)).digest()

    async def adapters(self) -> list[str]:
        """The adapters that servers of all blocks have."""
        records = [record for record in await self.connection.records(self.name) if usable(record)]
        names = {name for record in records for name in record.adapters}

        def lacking(name: str) -> list[tuple[int, int]]:
            return missing_blocks([record for record in records if name in record.adapters], 0, self.blocks)

        return sorted(name for name in names if not lacking(name))

    @property
    def guard(self) -> Guard | None:
        """By whom alone the ends of the model may be computed."""
        return None if self.trusted_peers is None else Guard(self.trusted_peers, self.blocks)

    async def chain(
        self,
        start: int,
        end: int,
        *,
        banned: Collection[str] = frozenset(),
        use: Use = SESSION,
        pushes: bool = False,
    ) -> list[Hop]:
        """A chain of servers for blocks `[start, end)`; parameters as of `route.find_chain`. Raises `MissingBlocks`."""
        return await self.connection.chain(
            self.name,
            start,
            end,
            fingerprint=self.fingerprint,
            adapter=self.adapter,
            banned=banned,
            use=use,
            pushes=pushes,
            guard=self.guard,
        )


def trusted_set(peers: Iterable[str] | str) -> frozenset[str] | None:
    """Peer ids from ids or from addresses that end with one; None if there are none. Raises `BadRequest`."""
    ids = [str(peer).rpartition("/p2p/")[2] for peer in ([peers] if isinstance(peers, str) else peers)]
    for peer in ids:
        try:
            PeerID.from_base58(peer)
        except Exception as e:  # the parser raises whatever comes to it
            raise BadRequest(f"{peer!r} is not a peer's id; `lilliput status --json` shows those of servers") from e
    return frozenset(ids) or None
