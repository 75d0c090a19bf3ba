"""Who of two or three is right: pure functions of what they returned."""

from __future__ import annotations

import pytest
import torch

from lilliput.client.audit import Account, distance, judge, tolerance

INPUTS = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0))
RIGHT = INPUTS + torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(1))
WRONG = RIGHT + 0.3 * torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(2))
ELSEWHERE = RIGHT + 0.3 * torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(3))


def account(peer: str, outputs: torch.Tensor, precision: str = "bfloat16") -> Account:
    return Account((peer,), outputs, (precision,))


@pytest.mark.parametrize(
    ("outputs", "trusted", "wrong"),
    [
        ([RIGHT, RIGHT], "", []),
        ([RIGHT, WRONG], "", None),
        ([RIGHT, WRONG, RIGHT], "", [1]),
        ([WRONG, RIGHT, RIGHT], "", [0]),
        ([RIGHT, WRONG, ELSEWHERE], "", None),
        ([RIGHT, WRONG, ELSEWHERE, WRONG], "", [0, 2]),  # whoever has the majority is believed
        ([RIGHT, WRONG, WRONG, RIGHT], "", None),
        ([RIGHT, WRONG], "a", [1]),
        ([RIGHT, WRONG, RIGHT], "b", [0, 2]),
        ([RIGHT, WRONG, RIGHT], "ab", [1]),
    ],
)
def test_those_who_are_trusted_and_the_majority_are_believed(
    outputs: list[torch.Tensor], trusted: str, wrong: list[int] | None
) -> None:
    accounts = [account(peer, of_peer) for peer, of_peer in zip("abcd", outputs, strict=False)]
    assert judge(INPUTS, accounts, trusted=trusted) == wrong


def test_a_third_that_agrees_with_both_lies_between_them() -> None:
    apart = RIGHT - INPUTS
    one, other = (account(peer, RIGHT + share * apart) for peer, share in (("a", 0.07), ("b", -0.07)))
    assert judge(INPUTS, [one, other]) is None
    assert judge(INPUTS, [one, other, account("c", RIGHT)]) == []


def test_a_lie_about_one_token_is_not_hidden_by_the_others() -> None:
    lie = RIGHT.clone()
    lie[1, 3] = INPUTS[1, 3]  # the blocks were left out
    assert distance(INPUTS, RIGHT, lie) > 1
    assert distance(INPUTS, RIGHT, RIGHT) == 0


def test_numbers_that_hardly_change_are_compared_by_their_own_size() -> None:
    """Tokens that all others attend to are so long that rounding them is more than what a block does to them."""
    inputs = 1e4 * torch.ones(1, 1, 64)
    one, other = (inputs + 10 + sign * torch.randn(1, 1, 64) for sign in (1, -1))
    assert distance(inputs, one, other) < tolerance(["bfloat16"])


def test_who_computes_in_fewer_bits_is_allowed_more() -> None:
    allowed = [tolerance([precision]) for precision in ("float32", "bfloat16", "int8", "int4")]
    assert allowed == sorted(allowed)
    assert tolerance(["float32", "int4"]) == tolerance(["something new"]) == allowed[-1]
    assert tolerance(["bfloat16"], "int8") > tolerance(["bfloat16"])
    near = RIGHT + 0.6 * (WRONG - RIGHT)
    assert judge(INPUTS, [account("a", RIGHT), account("b", near)]) is None
    assert judge(INPUTS, [account("a", RIGHT), account("b", near, "int4")]) == []
