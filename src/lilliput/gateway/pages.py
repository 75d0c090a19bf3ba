"""Pages for people: one HTML file each, which asks nobody but this server for anything."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from starlette.responses import HTMLResponse, Response

_FOLDER = Path(__file__).parent
_STYLE = re.compile(r'<link rel="stylesheet" href="([\w.]+)">')
_SCRIPT = re.compile(r'<script src="([\w.]+)"></script>')


class Page:
    """A file of this folder, with the style and the script of this folder that it names written into it.

    A browser runs that script, or the one that stands in the file, and no other.
    """

    def __init__(self, file_name: str) -> None:
        html = _STYLE.sub(lambda named: f"<style>\n{_read(named[1])}</style>", _read(file_name))
        self._html = _SCRIPT.sub(lambda named: f"<script>\n{_read(named[1])}</script>", html)
        script = re.search(r"<script>(.*?)</script>", self._html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(script[1].encode() if script else b"").digest()).decode()
        self._headers = {
            "Content-Security-Policy": "default-src 'none'; connect-src 'self'; img-src data:; "
            f"style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'; "
            "frame-ancestors 'none'",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }

    def response(self) -> Response:
        return HTMLResponse(self._html, headers=self._headers)


def _read(file_name: str) -> str:
    return (_FOLDER / file_name).read_text(encoding="utf-8")
