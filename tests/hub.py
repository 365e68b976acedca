"""A server that answers as the Hub does, for huggingface_hub's file system: repositories with
commits, folders, and files by range.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import threading
import urllib.parse
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Hub:
    """One dataset, "datasets/org/name", and its commits in order; the last is `main`. `seen` has
    the revisions of which files were read. A `token` makes the repository private. The first
    `refusals` requests for a commit and for a file's bytes are told to come later.
    """

    endpoint: str = ""
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    seen: list[str] = field(default_factory=list)
    token: str = ""
    refusals: int = 0
    refused: Counter[str] = field(default_factory=Counter)

    def push(self, files: Mapping[str, bytes]) -> str:
        """Commit these files as all that the repository has."""
        commit = hashlib.sha1(f"commit {len(self.commits)}".encode()).hexdigest()
        self.commits[commit] = dict(files)
        return commit

    def commit_of(self, revision: str) -> str | None:
        """The full hash of a revision, if there is one."""
        if revision == "main":
            return next(reversed(self.commits))
        return revision if revision in self.commits else None


@contextlib.contextmanager
def hub_server() -> Iterator[Hub]:
    """Serve an empty repository until the context ends."""
    hub = Hub()

    class Answering(_Answering):
        of = hub

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Answering(http.server.BaseHTTPRequestHandler):
    of: Hub

    def parse_request(self) -> bool:
        """Refuse requests without the token, and those that come too early."""
        if not super().parse_request():
            return False
        place = f"{self.command} {self.path}"
        if self.of.token and self.headers["Authorization"] != f"Bearer {self.of.token}":
            self._missing("RepoNotFound", 401)
        elif "/tree/" not in place and self.of.refused[place] < self.of.refusals:
            self.of.refused[place] += 1
            self._missing("", 429)
        else:
            return True
        self.close_connection = True
        return False

    def do_GET(self) -> None:
        parts = urllib.parse.unquote(self.path.partition("?")[0]).strip("/").split("/")
        match parts:
            case ["api", "datasets", "org", "name"]:
                self._info("main")
            case ["api", "datasets", "org", "name", "revision", revision]:
                self._info(revision)
            case ["api", "datasets", "org", "name", "tree", revision, *folder]:
                self._tree(revision, "".join(f"{part}/" for part in folder))
            case ["datasets", "org", "name", "resolve", revision, *path]:
                self._file(revision, "/".join(path))
            case _:
                self._missing("RepoNotFound")

    def do_POST(self) -> None:
        parts = urllib.parse.unquote(self.path).strip("/").split("/")
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        asked = urllib.parse.parse_qs(body)["paths"]
        match parts:
            case ["api", "datasets", "org", "name", "paths-info", revision]:
                files = self.of.commits.get(self.of.commit_of(revision) or "", {})
                self._json([_entry(path, files[path]) for path in asked if path in files])
            case _:
                self._missing("RepoNotFound")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Say nothing."""

    def _info(self, revision: str) -> None:
        commit = self.of.commit_of(revision)
        if commit is None:
            self._missing("RevisionNotFound")
        else:
            self._json({"_id": "1", "id": "org/name", "sha": commit, "private": False, "tags": []})

    def _tree(self, revision: str, folder: str) -> None:
        commit = self.of.commit_of(revision)
        files = self.of.commits.get(commit or "", {})
        is_deep = "recursive=True" in self.path or "recursive=true" in self.path
        found: dict[str, dict[str, Any]] = {}
        for path, body in files.items():
            if path.startswith(folder):
                cut = path[len(folder) :].split("/")
                for depth in range(1, len(cut)):
                    above = folder + "/".join(cut[:depth])
                    tree = {"type": "directory", "path": above, "size": 0, "oid": "0" * 40}
                    if is_deep or depth == 1:
                        found[above] = tree
                if is_deep or len(cut) == 1:
                    found[path] = _entry(path, body)
        if found:
            self._json(list(found.values()))
        else:
            self._missing("EntryNotFound")

    def _file(self, revision: str, path: str) -> None:
        self.of.seen.append(revision)
        commit = self.of.commit_of(revision)
        body = self.of.commits.get(commit or "", {}).get(path)
        if body is None:
            self._missing("EntryNotFound")
            return
        start, _, end = (self.headers["Range"] or "bytes=0-").removeprefix("bytes=").partition("-")
        part = body[int(start) : int(end or len(body)) + 1]
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {start}-{int(start) + len(part) - 1}/{len(body)}")
        self._end(part)

    def _json(self, answer: object) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self._end(json.dumps(answer).encode())

    def _missing(self, code: str, status: int = 404) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", code)
        self._end(b"{}")

    def _end(self, body: bytes) -> None:
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _entry(path: str, body: bytes) -> dict[str, Any]:
    return {
        "type": "file",
        "path": path,
        "size": len(body),
        "oid": hashlib.sha1(body).hexdigest(),
    }
