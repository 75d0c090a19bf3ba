"""A span's cache is divided into groups of blocks that look equally far back, and each block has its own part."""

from __future__ import annotations

import pytest

from lilliput.models.paged_cache import Group, divide


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ("ffff", ["0123"]),
        ("wwww", ["0123"]),
        ("wfwfwf", ["024", "135"]),
        ("wwwwwfwwwwwf", ["0 1", "2 3", "4 6", "5 11", "7 8", "9 10"]),
        ("wwf", ["0", "1", "2"]),
        ("wwwwffff", ["0123", "4567"]),
    ],
)
def test_groups_are_about_equally_large(kinds: str, expected: list[str]) -> None:
    groups = divide({i: (8 if kind == "w" else None, 100) for i, kind in enumerate(kinds)})
    assert [group.blocks for group in groups] == [
        tuple(map(int, part.split() if " " in part else part)) for part in expected
    ]
    assert all(group == Group(group.blocks, 8 if kinds[group.blocks[0]] == "w" else None) for group in groups)
