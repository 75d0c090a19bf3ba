"""What a server tells the swarm about itself."""

from __future__ import annotations

import logging
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

log = logging.getLogger(__name__)

State = Literal["joining", "serving", "draining"]
Count = Annotated[int, Field(ge=0, le=1 << 53)]
#: how deep models are; what a stranger says may decide how much is allocated
MOST_BLOCKS = 1 << 16
Block = Annotated[int, Field(ge=0, le=MOST_BLOCKS)]
Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def _printable(text: str) -> str:
    """Strangers' words are shown at terminals, which would obey some of them."""
    return text if text.isprintable() else "".join(filter(str.isprintable, text))


Name = Annotated[str, Field(max_length=256), AfterValidator(_printable)]

#: a record larger than this is not read
MAX_RECORD_BYTES = 16 << 10
#: servers whose distance a record tells
MOST_FOLLOWERS = 16


class ServerRecord(BaseModel):
    """One server's announcement. Fields that a newer version adds are ignored.

    Rates are measured by the server itself; None where it has not measured yet.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    peer_id: Name
    model: Name
    #: what its owner calls the server, for people; anybody may call theirs so, too
    name: Name = ""
    #: identifies the weights: servers of one model with different fingerprints must not be mixed
    fingerprint: Name = ""
    #: blocks of the whole model
    model_blocks: Block = 0
    #: the server holds blocks `[start, end)`
    start: Block
    end: Block
    state: State = "serving"
    dtype: Name = ""
    #: tokens per row that a session may ask for
    max_length: Count = 0
    #: tokens of attention cache, over all rows of all sessions
    cache_tokens: Count = 0
    cache_tokens_free: Count = 0
    sessions: Count = 0
    #: sessions that wait for a place
    queue_length: Count = 0
    #: of one stream through the server's whole span
    tokens_per_second: Rate | None = None
    #: of a long prefix through the server's whole span
    prefill_tokens_per_second: Rate | None = None
    #: milliseconds that one step of one token takes through the whole span
    step_ms: Rate | None = None
    #: tokens per second through the whole span when several streams come together, as measured before the first one
    #: came: what placement weighs, since it does not change with what the server has to do
    throughput: Rate | None = None
    #: where the server wants to move, or moves if it is draining: blocks `[start, end)`
    moving_to: tuple[Block, Block] | None = None
    #: the nearest servers that could follow this one in a chain: peer ids, and milliseconds to them and back
    followers: Annotated[tuple[tuple[Name, Rate], ...], Field(max_length=MOST_FOLLOWERS)] = ()
    adapters: tuple[Name, ...] = ()
    version: Name = ""
    #: seconds since the epoch
    started_at: Rate = 0.0
    addresses: tuple[Name, ...] = ()

    @model_validator(mode="after")
    def _span_makes_sense(self) -> ServerRecord:
        if self.start >= self.end:
            raise ValueError(f"an empty span: {self.start}:{self.end}")
        if self.moving_to is not None and not self.moving_to[0] < self.moving_to[1]:
            raise ValueError(f"an empty span to move to: {self.moving_to[0]}:{self.moving_to[1]}")
        if self.model_blocks and self.end > self.model_blocks:
            raise ValueError(f"the span {self.start}:{self.end} leaves the model's {self.model_blocks} blocks")
        return self

    def __str__(self) -> str:
        return f"{self.peer_id[-8:]} ({self.start}:{self.end})"

    def to_bytes(self) -> bytes:
        """Compact JSON, without what is at its default."""
        return self.model_dump_json(exclude_defaults=True).encode()

    @classmethod
    def from_bytes(cls, data: object) -> ServerRecord | None:
        """The record, or None for anything that is not one: whoever reads the DHT meets anything."""
        if not isinstance(data, bytes) or not data or len(data) > MAX_RECORD_BYTES:
            return None
        try:
            return cls.model_validate_json(data)
        except ValidationError as e:
            log.debug("skipped a record that makes no sense: %s", e)
            return None
