"""A hub on this machine: the API of the Hugging Face Hub as far as we use it, over real sockets, and with faults.

The hub redirects downloads to a second server on another port, as the real one does to the servers of its network.
``tests/hub/test_hub_server.py`` holds it to what Hugging Face's own library expects.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import http.server
import json
import re
import socket
import struct
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any

import attrs

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@attrs.define
class Repository:
    """A repository and what may be done with it."""

    files: dict[str, bytes]
    is_gated: bool = False
    is_private: bool = False
    in_git: tuple[str, ...] = ()
    """Files that are kept in git, without a SHA-256."""


@attrs.frozen(kw_only=True)
class Fault:
    """What goes wrong with one answer of a file."""

    cut_after: int | None = None
    """Bytes of the body after which the connection is reset."""
    status: int | None = None
    headers: dict[str, str] = attrs.field(factory=dict)
    """Replace those of the right answer; an empty value leaves one out."""
    ignores_range: bool = False
    change: Callable[[bytes], bytes] = lambda body: body
    """Makes the body that is sent."""
    hold: tuple[threading.Event, threading.Event] | None = None
    """Sets the first event, and waits for the second one before it goes on behind ``cut_after``."""
    redirect: str | None = None
    raw: bytes | None = None
    """What the hub sends instead of an answer."""
    closes: bool = False
    """Ends the connection after the body without a length."""


@attrs.frozen
class Request:
    """What a client sent."""

    server: str
    """``hub`` or ``files``"""
    path: str
    headers: dict[str, str]
    """Names in lower case."""


class FakeHub:
    """Two servers; see ``fake_hub``."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.token: str | None = "hf_secret"
        """What opens private and gated repositories."""
        self.faults: collections.deque[Fault] = collections.deque()
        """For the next answers of files, one each; then all are right."""
        self.hub_faults: collections.deque[Fault] = collections.deque()
        """For the next answers of the hub."""
        self.requests: list[Request] = []
        self.plain: dict[str, bytes] = {}
        """Files by path, which the server of files gives without a redirect."""
        self.etags: dict[str, str | None] = {}
        """ETags of plain files; a strong one by content where there is none."""
        self._hub = _server(self, _Hub)
        self._files = _server(self, _Files)
        self.url = f"http://127.0.0.1:{self._hub.server_address[1]}"
        self.files_url = f"http://127.0.0.1:{self._files.server_address[1]}"

    def add(self, name: str, files: dict[str, bytes], **options: Any) -> Repository:
        self.repositories[name] = Repository(files, **options)
        return self.repositories[name]

    def file_requests(self) -> list[Request]:
        return [request for request in self.requests if request.server == "files"]

    def run(self) -> contextlib.ExitStack:
        stack = contextlib.ExitStack()
        for server in (self._hub, self._files):
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
            thread.start()
            stack.callback(thread.join)
            stack.callback(server.server_close)
            stack.callback(server.shutdown)
        return stack


@contextlib.contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """A hub that runs until the end of the context."""
    hub = FakeHub()
    with hub.run():
        yield hub


def git_sha1(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _server(hub: FakeHub, handler: type[_Handler]) -> http.server.ThreadingHTTPServer:
    class Bound(handler):  # type: ignore[misc, valid-type]
        pass

    Bound.hub = hub
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Bound)
    server.daemon_threads = True
    server.handle_error = lambda request, client: None  # type: ignore[method-assign]  # clients that are killed
    return server


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub
    name: str

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.hub.requests.append(Request(self.name, self.path, headers))
        self.answer(headers)

    def answer(self, headers: dict[str, str]) -> None:
        raise NotImplementedError

    def send(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"content-length": str(len(body)), **headers}.items():
            if value:
                self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_file(self, content: bytes, etag: str | None, fault: Fault) -> None:
        """Send ``content`` or a range of it, as right as ``fault`` allows."""
        start, status = 0, 200
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("range", ""))
        if_range = self.headers.get("if-range")
        if wanted and not fault.ignores_range and (if_range is None or if_range == etag):
            start, status = int(wanted[1]), 206
        answer = {"accept-ranges": "bytes", "content-type": "application/octet-stream"}
        if etag is not None:
            answer["etag"] = etag
        if start >= len(content) and status == 206:
            self.send(416, content_range=f"bytes */{len(content)}")
            return
        if status == 206:
            answer["content-range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        body = fault.change(content[start:])
        answer["content-length"] = str(len(content) - start)
        answer |= fault.headers
        self.send_response(fault.status or status)
        for name, value in answer.items():
            if value:
                self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault.hold is None and fault.cut_after is None:
            self.wfile.write(body)
            if fault.closes:
                self.close_connection = True
            return
        self.wfile.write(body[: fault.cut_after])
        self.wfile.flush()
        if fault.hold is not None:
            reached, go_on = fault.hold
            reached.set()
            go_on.wait(60)
            self.wfile.write(body[fault.cut_after or 0 :])
            return
        self.reset()

    def reset(self) -> None:
        """Cut the connection as a router does."""
        self.close_connection = True
        self.wfile.flush()
        # what was sent arrives before the reset, because the client reads it while the other side half-closes
        self.connection.shutdown(socket.SHUT_WR)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


class _Hub(_Handler):
    """The hub itself."""

    name = "hub"

    def answer(self, headers: dict[str, str]) -> None:
        if self.hub.hub_faults:
            fault = self.hub.hub_faults.popleft()
            if fault.raw is not None:
                self.close_connection = True
                self.wfile.write(fault.raw)
            else:
                self.send(fault.status or 500, **fault.headers)
            return
        parts = urllib.parse.urlsplit(self.path)
        query = urllib.parse.parse_qs(parts.query)
        path = urllib.parse.unquote(parts.path)
        if path == "/api/models":
            words = query.get("search", [""])[0].lower().split()
            found = [name for name in self.hub.repositories if all(word in name.lower() for word in words)]
            self.send_json([{"id": name, "downloads": 1} for name in found])
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?", path):
            self.describe(match[1], match[2] or "main", headers)
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self.redirect(match[1], match[2], match[3], headers)
        else:
            self.send(404)

    def send_json(self, value: Any) -> None:
        self.send(200, json.dumps(value).encode(), content_type="application/json")

    def find(self, name: str, revision: str, headers: dict[str, str]) -> Repository | None:
        """The repository, unless it may not be read; then that is answered."""
        found = self.hub.repositories.get(name)
        may_read = headers.get("authorization") == f"Bearer {self.hub.token}"
        if found is None or (found.is_private and not may_read):
            status = 404 if may_read else 401
            self.send(status, x_error_code="RepoNotFound", x_error_message="Repository not found")
            return None
        if revision not in ("main", COMMIT):
            self.send(404, x_error_code="RevisionNotFound", x_error_message=f"Invalid rev id: {revision}")
            return None
        return found

    def describe(self, name: str, revision: str, headers: dict[str, str]) -> None:
        found = self.find(name, revision, headers)
        if found is None:
            return
        siblings: list[dict[str, Any]] = []
        for path, content in found.files.items():
            entry = {"rfilename": path, "size": len(content), "blobId": git_sha1(content)}
            if path not in found.in_git:
                digest = hashlib.sha256(content).hexdigest()
                entry["lfs"] = {"sha256": digest, "size": len(content), "pointerSize": 134}
            siblings.append(entry)
        gated = "manual" if found.is_gated else False
        self.send_json(
            {
                "_id": "0",
                "id": name,
                "modelId": name,
                "sha": COMMIT,
                "private": found.is_private,
                "gated": gated,
                "tags": ["gguf"],
                "downloads": 1,
                "likes": 0,
                "siblings": siblings,
            }
        )

    def redirect(self, name: str, revision: str, path: str, headers: dict[str, str]) -> None:
        found = self.find(name, revision, headers)
        if found is None:
            return
        if found.is_gated and headers.get("authorization") != f"Bearer {self.hub.token}":
            self.send(401, x_error_code="GatedRepo", x_error_message=f"Access to {name} is restricted")
            return
        if path not in found.files:
            self.send(404, x_error_code="EntryNotFound", x_error_message="Entry not found", x_repo_commit=COMMIT)
            return
        content = found.files[path]
        digest = hashlib.sha256(content).hexdigest()
        if path in found.in_git:
            self.send_file(content, f'"{git_sha1(content)}"', Fault(headers={"x-repo-commit": COMMIT}))
            return
        self.send(
            302,
            location=f"{self.hub.files_url}/{digest}/{urllib.parse.quote(name)}/{urllib.parse.quote(path)}?signature=secret",
            x_repo_commit=COMMIT,
            x_linked_size=str(len(content)),
            x_linked_etag=f'"{digest}"',
            etag=f'"{digest}"',
        )


class _Files(_Handler):
    """Where the bytes are."""

    name = "files"

    def answer(self, headers: dict[str, str]) -> None:
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        content, etag = self.hub.plain.get(path), None
        if content is None:
            match = re.fullmatch(r"/([0-9a-f]{64})/([^/]+/[^/]+)/(.+)", path)
            repository = self.hub.repositories.get(match[2]) if match else None
            content = repository.files.get(match[3]) if repository is not None and match else None
        if content is None:
            self.send(404)
            return
        etag = self.hub.etags.get(path, f'"{hashlib.sha256(content).hexdigest()}"')
        fault = self.hub.faults.popleft() if self.hub.faults and self.command == "GET" else Fault()
        if fault.redirect is not None:
            self.send(302, location=fault.redirect)
        elif fault.status is not None and fault.status >= 400:
            self.send(fault.status, **fault.headers)
        else:
            self.send_file(content, etag, fault)
