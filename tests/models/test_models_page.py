"""docs/models.md says what is in the table."""

from __future__ import annotations

from models_page import PAGE, page, release_of


def test_the_page_is_up_to_date() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == page(release_of(text)), "run `make models`"
