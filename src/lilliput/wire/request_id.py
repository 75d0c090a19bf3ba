"""The name of one request, which the logs of all machines that take part in it carry.

Strangers choose such names, too. What does not look like one does not get into a log: it could look like a line of it.
"""

from __future__ import annotations

import re
import secrets

from lilliput.errors import BadRequest

LONGEST = 128
_REQUEST_ID = re.compile(rf"[A-Za-z0-9._~:/+=@-]{{1,{LONGEST}}}")


def new() -> str:
    """One that nobody else has."""
    return f"req_{secrets.token_hex(8)}"


def is_request_id(text: str) -> bool:
    return _REQUEST_ID.fullmatch(text) is not None


def checked(text: str) -> str:
    """The same; empty means that there is none. Raises `BadRequest`."""
    if text and not is_request_id(text):
        raise BadRequest(f"a request id has 1 to {LONGEST} letters, digits or any of . _ ~ : / + = @ -")
    return text
