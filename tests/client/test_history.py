"""What a session remembers of its tokens."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from lilliput.client.history import PADDING, UNKNOWN, TokenHistory
from lilliput.wire.prefix import GRAIN, KEY_BYTES, prefix_keys


def split(keys: bytes) -> list[bytes]:
    return [keys[i : i + KEY_BYTES] for i in range(0, len(keys), KEY_BYTES)]


@given(st.lists(st.integers(0, 1 << 20), max_size=100), st.lists(st.integers(1, 40), max_size=10), st.integers(0, 100))
def test_keys_come_out_the_same_however_the_tokens_come_in(tokens: list[int], cuts: list[int], back: int) -> None:
    history = TokenHistory(b"salt")
    keys: list[bytes] = []
    at = 0
    for cut in [*cuts, len(tokens)]:
        part = torch.tensor([tokens[at : at + cut]], dtype=torch.int64)
        at += part.shape[1]
        if part.numel():
            keys += split(history.append(part))
    assert keys == prefix_keys(tokens[:at], salt=b"salt")
    back = min(back, at)
    history.crop(back)
    again = torch.tensor([tokens[back:at]], dtype=torch.int64)
    if again.numel():
        assert split(history.append(again)) == keys[back // GRAIN :]
    assert history.tokens.tolist() == [tokens[:at]] or not at


def test_each_row_has_its_own_keys_in_the_order_of_rows() -> None:
    tokens = torch.arange(2 * GRAIN * 2).reshape(2, -1)
    history = TokenHistory(b"x")
    expected = [key for row in tokens.tolist() for key in prefix_keys(row, salt=b"x")]
    assert split(history.keys_of(tokens)) == expected
    assert split(history.append(tokens)) == expected


def test_padding_and_unknown_tokens_end_a_row_s_keys() -> None:
    for strange in (PADDING, UNKNOWN):
        tokens = torch.arange(2 * GRAIN * 2).reshape(2, -1)
        tokens[1, GRAIN] = strange
        history = TokenHistory(b"x")
        assert len(split(history.keys_of(tokens))) == 2  # the first grain of both rows
        assert history.append(tokens) == b""
        assert history.append(torch.zeros(2, GRAIN, dtype=torch.int64)) == b""


def test_rows_follow_their_parents() -> None:
    history = TokenHistory(b"x")
    tokens = torch.arange(3 * GRAIN).reshape(3, -1)
    history.append(tokens)
    history.reorder([2, 2, 0, 1])
    assert history.tokens.tolist() == tokens[[2, 2, 0, 1]].tolist()
    more = torch.full((4, GRAIN), 9)
    expected = [prefix_keys([*tokens[p].tolist(), *([9] * GRAIN)], salt=b"x")[1] for p in (2, 2, 0, 1)]
    assert split(history.append(more)) == expected


def test_a_conversation_is_continued_from_the_row_that_agrees_longest() -> None:
    history = TokenHistory(b"x")
    history.append(torch.tensor([[1, 2, 3, 4], [1, 2, 9, 9]]))
    assert history.continues(torch.tensor([[1, 2, 3, 4, 5]])) == ([0], 4)
    assert history.continues(torch.tensor([[1, 2, 9]])) == ([1], 3)
    assert history.continues(torch.tensor([[1, 2, 9, 9, 7], [1, 2, 3, 7, 7]])) == ([1, 0], 3)
    assert history.continues(torch.tensor([[8, 2]])) == ([0], 0)
    assert TokenHistory(b"x").continues(torch.tensor([[1]])) == ([], 0)


def test_padding_agrees_with_padding_but_nothing_agrees_with_the_unknown() -> None:
    history = TokenHistory(b"x")
    history.append(torch.tensor([[PADDING, 5, 6, UNKNOWN]]))
    assert history.continues(torch.tensor([[PADDING, 5, 6, UNKNOWN]])) == ([0], 3)
    assert history.continues(torch.tensor([[0, 5, 6]])) == ([0], 0)
