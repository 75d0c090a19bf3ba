"""Every error a user of Lilliput can meet, drawn as a tree.

    LilliputError
    ├── ModelError            the model cannot be found, fetched, read, or served (exit: fix the name or the files)
    │   └── UnsupportedModel  its family computes in a way that cannot be served; no other name or file will help
    ├── SwarmError            nothing wrong with the request; the swarm cannot take it now
    │   ├── MissingBlocks     no server holds blocks i..j
    │   │   └── MissingAdapter    none that holds them has the adapter that was asked for
    │   ├── Unreachable       a peer does not answer
    │   ├── Busy              everyone who could serve this is full; says for how long
    │   ├── Draining          the server is about to leave
    │   ├── WrongAnswer       a server was found out: it returns what others, asked the same, do not
    │   ├── Disputed          servers return something else for the same, and nobody can tell who is right
    │   └── SessionExpired    nothing was heard from the client for too long, and the server closed the session
    ├── RequestError          the request itself is wrong; sending it elsewhere will not help
    │   ├── BadRequest        shapes, dtypes, masks, parents, positions, ...
    │   ├── WrongBlocks       the server does not hold the blocks that were asked for
    │   ├── TooLong           past the session's or the server's maximum length
    │   └── Unauthorized      the peer may not do this
    ├── CacheFull             the server has no room for this session's cache
    └── ServerFailure         the server broke while it computed (its log says why)

Errors cross the network as a code (`ErrorCode`), a message for a person, and whether asking another server can help.
"""

from __future__ import annotations

from typing import ClassVar


class LilliputError(Exception):
    """Base of all errors raised on purpose by Lilliput."""

    #: the name of the error on the wire
    code: ClassVar[str] = "INTERNAL"
    #: whether the same request may succeed at another server
    retry_elsewhere: ClassVar[bool] = False


class ModelError(LilliputError):
    """A model cannot be found, fetched, read, or served by this program."""


class UnsupportedModel(ModelError):
    """The model's family computes in a way that cannot be served (yet)."""


class SwarmError(LilliputError):
    """The swarm cannot take a correct request now."""

    retry_elsewhere = True


class MissingBlocks(SwarmError):
    """No server holds some blocks. `blocks` lists the missing spans as `(start, end)` pairs, end excluded."""

    def __init__(self, message: str, blocks: tuple[tuple[int, int], ...] = ()) -> None:
        super().__init__(message)
        self.blocks = blocks


class MissingAdapter(MissingBlocks):
    """A server has not the adapter that was asked for, or no server that holds some blocks has it."""

    code = "NO_ADAPTER"


class Unreachable(SwarmError):
    """A peer does not answer, or the connection to it broke. `peer` is its id, if known."""

    def __init__(self, message: str, peer: str | None = None) -> None:
        super().__init__(message)
        self.peer = peer


class Busy(SwarmError):
    """All places are taken.

    `wait_seconds` is the expected wait, `queue_length` how many sessions must finish before this one can start.
    """

    code = "BUSY"

    def __init__(self, message: str, wait_seconds: float | None = None, queue_length: int | None = None) -> None:
        super().__init__(message)
        self.wait_seconds = wait_seconds
        self.queue_length = queue_length


class Draining(SwarmError):
    """The server takes nothing new because it is about to leave."""

    code = "DRAINING"


class WrongAnswer(SwarmError):
    """A server was audited, and does not return what others do that are asked the same. It is not used any more."""


class Disputed(SwarmError):
    """Servers return something else for the same, and there is no other to tell who is right. `peers` are their ids."""

    retry_elsewhere = False

    def __init__(self, message: str, peers: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.peers = peers


class SessionExpired(SwarmError):
    """The server closed the session because nothing came from the client for too long."""

    code = "EXPIRED"


class RequestError(LilliputError):
    """The request is wrong in itself."""

    code = "BAD_REQUEST"


class BadRequest(RequestError):
    """A shape, dtype, mask, parent, position or message that makes no sense."""


class WrongBlocks(RequestError):
    """The server does not hold the blocks that were asked for."""

    code = "WRONG_BLOCKS"
    retry_elsewhere = True


class TooLong(RequestError):
    """Past the maximum length that the session asked for, or that the server allows."""

    code = "TOO_LONG"


class Unauthorized(RequestError):
    """The peer may not do this."""

    code = "UNAUTHORIZED"


class CacheFull(LilliputError):
    """The server has no room for this session's cache."""

    code = "CACHE_FULL"
    retry_elsewhere = True


class ServerFailure(LilliputError):
    """The server failed while computing. Its log has the details."""

    retry_elsewhere = True


#: error classes by their code on the wire
BY_CODE: dict[str, type[LilliputError]] = {
    cls.code: cls
    for cls in (
        BadRequest,
        WrongBlocks,
        MissingAdapter,
        TooLong,
        Busy,
        CacheFull,
        SessionExpired,
        Draining,
        Unauthorized,
        ServerFailure,
    )
}


def from_code(code: str, message: str) -> LilliputError:
    """The error that a peer reported as `code` with `message`."""
    return BY_CODE.get(code, ServerFailure)(message)
