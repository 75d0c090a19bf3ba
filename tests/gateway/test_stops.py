"""A text ends where a stop string begins, however it comes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lilliput.gateway.stops import Stops

few = st.text("ab", max_size=12)


@given(st.lists(few, max_size=8), st.lists(st.text("ab", min_size=1, max_size=5), max_size=3))
def test_stops(pieces: list[str], strings: list[str]) -> None:
    stops = Stops(strings)
    shown = ""
    for piece in pieces:
        shown += stops.take(piece)
        if stops.found:
            break
    shown += stops.rest()
    # of several stop strings, the one that is complete first ends the text
    text = "".join(pieces)
    ends = [text[:end] for end in range(len(text) + 1) if any(text[:end].endswith(string) for string in strings)]
    assert stops.found == bool(ends)
    if ends:
        assert any(shown + string == text[: len(shown + string)] for string in strings)
        assert not any(string in shown for string in strings)
    else:
        assert shown == text
