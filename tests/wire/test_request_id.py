"""What may name a request in logs."""

from __future__ import annotations

import pytest

from lilliput.errors import BadRequest
from lilliput.wire import request_id


@pytest.mark.parametrize(
    "text", ["a", "req_01", "7c9e6679-7425-40de-944b-e07fc1f90ae7", "Root=1-67:a/b+c@d~e", "x" * 128]
)
def test_names(text: str) -> None:
    assert request_id.checked(text) == text


@pytest.mark.parametrize("text", ["a b", "a\nb", "a\n", "\x1b[2J", "ä", "x" * 129, 'a"b', "[a]", "\u2028"])
def test_what_is_none(text: str) -> None:
    assert not request_id.is_request_id(text)
    with pytest.raises(BadRequest, match="request id"):
        request_id.checked(text)


def test_new_ones_differ() -> None:
    found = {request_id.new() for _ in range(100)}
    assert len(found) == 100
    assert all(map(request_id.is_request_id, found))
