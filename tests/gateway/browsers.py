"""A real browser, where there is one, and pages that must not complain nor ask strangers."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PHONE = {"width": 390, "height": 800}


@contextlib.contextmanager
def opened(browser: Any, url: str, *, silent: bool = True, **options: Any) -> Iterator[Any]:
    """A page at `url`; in the end it must have asked nobody else for anything and, if `silent`, have met no error."""
    page = browser.new_page(**options)
    complaints: list[str] = []
    strangers: list[str] = []
    server = "/".join(url.split("/")[:3])
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda said: complaints.append(said.text) if silent and said.type == "error" else None)
    page.on("request", lambda r: None if r.url.startswith((server, "data:")) else strangers.append(r.url))
    page.goto(url)
    try:
        yield page
        assert (complaints, strangers) == ([], [])
    finally:
        page.close()


def fits(page: Any) -> bool:
    """Whether nothing sticks out at the side."""
    return bool(page.evaluate("document.documentElement.scrollWidth <= innerWidth"))
