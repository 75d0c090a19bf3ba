"""A hub on loopback that speaks as much of the real one's protocol as downloads and reading headers need."""

from __future__ import annotations

import hashlib
import http.server
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

COMMIT = "0123456789" * 4
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


@dataclass
class Hub:
    """What it has, and what it was asked for.

    :ivar repositories: folders by name, each with one commit on the branch `main`
    :ivar asked: each GET of a file: its name and the bytes that were sent, `(begin, end)`
    :ivar cut: files whose connection breaks after so many bytes
    :ivar spoilt: files in which a byte arrives changed
    :ivar unreachable_after: so many GETs of cut files are answered, further ones with a hang-up
    :ivar xet: says of weights that they are in its Xet storage, too, which it has not
    :ivar token: if set, who does not send it sees nothing
    """

    repositories: dict[str, Path] = field(default_factory=dict)
    asked: list[tuple[str, tuple[int, int]]] = field(default_factory=list)
    cut: dict[str, int] = field(default_factory=dict)
    spoilt: set[str] = field(default_factory=set)
    xet: bool = False
    token: str = ""
    unreachable_after: int | None = None
    port: int = 0

    @property
    def files_asked(self) -> set[str]:
        return {name for name, _ in self.asked}


class _Handler(http.server.BaseHTTPRequestHandler):
    hub: Hub

    def do_GET(self) -> None:
        hub = self.hub
        if hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
            return self._send(401, b"", {"X-Error-Code": "RepoNotFound"})
        for name, folder in hub.repositories.items():
            files = sorted(file for file in folder.iterdir() if file.is_file())
            revision = f"(main|{COMMIT})"
            if re.match(f"/api/models/{name}/tree/{revision}", self.path):
                tree = [{"type": "file", "path": f.name, "size": f.stat().st_size, "oid": git_digest(f)} for f in files]
                return self._json(tree)
            if re.match(f"/api/models/{name}(/revision/{revision})?(\\?|$)", self.path):
                return self._json({"id": name, "sha": COMMIT, "siblings": [{"rfilename": f.name} for f in files]})
            if self.path.startswith(f"/api/models/{name}/") or (
                self.path.startswith(f"/{name}/resolve/") and not re.match(f"/{name}/resolve/{revision}/", self.path)
            ):
                return self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
            if self.path.startswith(f"/{name}/resolve/"):
                file = folder / self.path.rpartition("/")[2]
                return self._file(file) if file.is_file() else self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
        return self._send(404, b"", {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET

    def _file(self, file: Path) -> None:
        content = bytearray(file.read_bytes())
        large = file.suffix == ".safetensors"
        etag = hashlib.sha256(content).hexdigest() if large else git_digest(file)
        if file.name in self.hub.spoilt:
            content[-1] ^= 1
        headers = {"ETag": f'"{etag}"', "Accept-Ranges": "bytes", "X-Repo-Commit": COMMIT}
        if large and self.hub.xet:
            headers |= {"X-Xet-Hash": etag, "X-Xet-Refresh-Route": f"http://127.0.0.1:{self.hub.port}/xet"}
        asked = _RANGE.fullmatch(self.headers.get("Range", ""))
        if not asked:
            begin, end, status = 0, len(content), 200
        else:
            begin, end = int(asked[1]), min(len(content), int(asked[2]) + 1 if asked[2] else len(content))
            if begin >= len(content):
                return self._send(416, b"", {"Content-Range": f"bytes */{len(content)}"})
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(content)}"
            status = 206
        if self.command == "GET":
            cut = [name for name, _ in self.hub.asked if name in self.hub.cut]
            if self.hub.unreachable_after is not None and len(cut) >= self.hub.unreachable_after:
                self.close_connection = True
                return
            self.hub.asked.append((file.name, (begin, end)))
        self._send(status, bytes(content[begin:end]), headers, self.hub.cut.get(file.name))

    def _json(self, content: object) -> None:
        self._send(200, json.dumps(content).encode(), {"Content-Type": "application/json", "X-Repo-Commit": COMMIT})

    def _send(self, status: int, body: bytes, headers: dict[str, str], most: int | None = None) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body if most is None else body[:most])
            self.close_connection = True

    def log_message(self, *args: object) -> None:
        pass


def git_digest(file: Path) -> str:
    content = file.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def point_hub_at(port: int, patch: pytest.MonkeyPatch) -> None:
    """What HF_ENDPOINT does before huggingface_hub is imported."""
    import huggingface_hub
    from huggingface_hub import constants, file_download

    url = f"http://127.0.0.1:{port}"
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, url)
    for module in constants, file_download:  # before 1.0 the second had a copy
        patch.setattr(module, "HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)
    patch.setattr(constants, "ENDPOINT", url)
    patch.setattr(huggingface_hub.hf_api.api, "endpoint", url)


@contextmanager
def running_hub(cache: Path, patch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """An empty hub, and an empty cache of this machine's."""
    import huggingface_hub.constants

    hub = Hub()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.port = server.server_port
    point_hub_at(hub.port, patch)
    patch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
