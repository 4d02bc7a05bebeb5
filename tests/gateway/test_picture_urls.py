"""Pictures that requests name by URL: fetched from a real server with TLS, and never from a private network."""

from __future__ import annotations

import contextlib
import ssl
import subprocess
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import anyio
import httpx
import httpx2
import pytest
import trio.testing

from tests.support.pictures import drawn, png
from tests.support.projectors import projector_file
from tests.support.real_daemon import real_daemon
from uma_trio.gateway import picture_urls
from uma_trio.gateway.errors import HttpError
from uma_trio.gateway.media import ToFetch
from uma_trio.gateway.picture_urls import MAX_REDIRECTS, PictureUrls

PICTURE = png(drawn(1))
PUBLIC, PRIVATE = "127.0.0.1", "127.0.0.2"
"""In these tests, the internet is one address of this machine."""
HOSTS = {"pictures.example": [PUBLIC], "inside.example": [PRIVATE], "both.example": [PUBLIC, PRIVATE]}


class Handler(BaseHTTPRequestHandler):
    """Serves ``/cat.png``; other paths say what else they do."""

    def do_GET(self) -> None:
        self.server.hosts.append(self.headers["Host"])  # type: ignore[attr-defined]
        kind, _, rest = self.path.partition("?")[0].strip("/").partition("/")
        if kind == "to":
            self.send_response(302)
            self.send_header("Location", rest.replace("PORT", str(self.server.server_port)))  # type: ignore[attr-defined]
            self.end_headers()
        elif kind in ("cat.png", "large", "slow"):
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):
                while kind == "large":
                    self.wfile.write(bytes(1 << 16))
                if kind == "slow":
                    self.server.stopping.wait(60)  # type: ignore[attr-defined]
                self.wfile.write(PICTURE)
        else:
            self.send_error(404)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[Any, ssl.SSLContext]]:
    """A server for pictures.example, and what trusts it."""
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    made = subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
            *("-keyout", key, "-out", certificate, "-subj", "/CN=pictures.example"),
            *("-addext", "subjectAltName=DNS:pictures.example"),
        ],
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stderr
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    found: Any = ThreadingHTTPServer((PUBLIC, 0), Handler)
    found.hosts, found.stopping = [], threading.Event()
    found.socket = context.wrap_socket(found.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=found.serve_forever, daemon=True)
    thread.start()
    try:
        yield found, ssl.create_default_context(cafile=str(certificate))
    finally:
        found.stopping.set()
        found.shutdown()
        found.server_close()
        thread.join()


@pytest.fixture
def urls(server: tuple[Any, ssl.SSLContext], monkeypatch: pytest.MonkeyPatch) -> PictureUrls:
    async def resolve(host: str, port: int) -> list[str]:
        return HOSTS.get(host, [host])

    monkeypatch.setattr(picture_urls, "is_public", lambda address: address == PUBLIC)
    monkeypatch.setattr(picture_urls, "RESOLVE_S", 0.1)
    return PictureUrls(True, 1 << 20, resolve, lambda: httpx2.AsyncHTTPTransport(verify=server[1]))


def fetched(urls: PictureUrls, fields: Mapping[str, Any]) -> Mapping[str, Any]:
    return anyio.run(urls.fetch, fields)  # on the event loop of the gateway, asyncio


def fields_of(*wanted: str) -> dict[str, Any]:
    parts = [ToFetch(f"here[{n}]", type="image", url=url) for n, url in enumerate(wanted)]
    return {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": [*parts, {"type": "text"}]}]}


def test_pictures_are_fetched_and_the_rest_stays(urls: PictureUrls, server: tuple[Any, ssl.SSLContext]) -> None:
    place = f"pictures.example:{server[0].server_port}"
    wanted = [
        f"https://{place}/cat.png?n=1",
        f"https://{place}/to//cat.png",
        f"https://{place}/to/https://{place}/cat.png",
    ]
    given = fields_of(*wanted)
    found = fetched(urls, given)
    image = {"type": "image", "data": PICTURE}
    assert found["messages"] == [given["messages"][0], {"role": "user", "content": [image] * 3 + [{"type": "text"}]}]
    assert set(server[0].hosts) == {place}
    assert "url" in given["messages"][1]["content"][0], "what was given is as it was"
    for as_sent in (
        {"prompt": "a"},
        {"messages": [{"role": "user", "content": [{"type": "image", "url": wanted[0]}]}]},
    ):
        assert fetched(urls, as_sent) == as_sent, "clients of the native API name no URLs"


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("https://inside.example:PORT/cat.png", "inside.example has no public address"),
        ("https://both.example:PORT/cat.png", "both.example has no public address"),
        ("https://127.0.0.2:PORT/cat.png", "127.0.0.2 has no public address"),
        (
            "https://pictures.example:PORT/to/https://inside.example:PORT/cat.png",
            "inside.example has no public address",
        ),
        ("https://pictures.example:PORT/to/http://pictures.example:PORT/cat.png", "is not encrypted"),
        ("https://pictures.example:PORT/to/file:///etc/passwd", "is not a URL of a web server"),
        ("https://127.0.0.1:PORT/cat.png", "cannot be fetched: .*certificate"),
        ("https://user:secret@pictures.example:PORT/cat.png", "a password in it"),
        ("https://pictures.example:PORT/none", "answers with the status 404"),
        ("https://pictures.example:PORT/large", "have more than 1,048,576 bytes"),
        ("https://pictures.example:PORT/slow", "takes longer than 1 s"),
        ("https://pictures.example:1/cat.png", "cannot be fetched"),
    ],
)
def test_what_may_not_be_fetched_is_refused(
    urls: PictureUrls, server: tuple[Any, ssl.SSLContext], monkeypatch: pytest.MonkeyPatch, url: str, reason: str
) -> None:
    monkeypatch.setattr(picture_urls, "FETCH_S", 1.0 if "slow" in url else 30.0)
    with pytest.raises(HttpError, match=reason) as refused:
        fetched(urls, fields_of(url.replace("PORT", str(server[0].server_port))))
    assert (refused.value.status, refused.value.parameter) == (400, "messages[1].content[0]")
    assert "secret" not in str(refused.value)


def in_virtual_time(ask: Callable[[], Awaitable[Any]]) -> Any:
    clock = trio.testing.MockClock(autojump_threshold=0)
    return anyio.run(ask, backend="trio", backend_options={"clock": clock})


def test_nobody_learns_which_names_are_inside() -> None:
    """Names that are there, that are not, and whose servers are slow are refused in the same words and time."""

    async def resolve(host: str, port: int) -> list[str]:
        match host[0]:
            case "a":
                return [PRIVATE]
            case "b":
                raise OSError("no such name")
            case "c":
                await anyio.sleep(1.0)
                return [PUBLIC, PRIVATE]
            case "d":
                await anyio.sleep(3600)
        return []

    async def refused(host: str) -> tuple[str, float]:
        began = anyio.current_time()
        with pytest.raises(HttpError, match="has no public address") as found:
            await PictureUrls(True, 1 << 20, resolve).fetch(fields_of(f"https://{host}/cat.png"))
        return str(found.value).replace(host, "HOST"), round(anyio.current_time() - began, 6)

    async def all_refused() -> set[tuple[str, float]]:
        return {await refused(f"{kind}.example") for kind in "abcde"}

    assert len(in_virtual_time(all_refused)) == 1


def test_one_who_has_many_pictures_leaves_room_for_others() -> None:
    running: Counter[str] = Counter()

    async def resolve(host: str, port: int) -> list[str]:
        running[host] += 1
        await anyio.sleep(1.0)
        return []

    async def ask() -> None:
        urls = PictureUrls(True, 1 << 20, resolve)

        async def fetch(principal: str) -> None:
            with contextlib.suppress(HttpError):
                fields = fields_of(*[f"https://{principal}.example/{n}.png" for n in range(9)])
                await urls.fetch({**fields, "principal": principal})

        async with anyio.create_task_group() as tasks:
            for principal in [*["many"] * 6, "few", "other"]:
                tasks.start_soon(fetch, principal)
            await anyio.sleep(0.5)
            assert running == {f"{each}.example": 4 for each in ("many", "few", "other")}

    in_virtual_time(ask)


def test_redirects_end(urls: PictureUrls, server: tuple[Any, ssl.SSLContext]) -> None:
    place = f"https://pictures.example:{server[0].server_port}"
    with pytest.raises(HttpError, match="redirects more than 3 times"):
        fetched(urls, fields_of(f"{place}/{'to//' * (MAX_REDIRECTS + 1)}cat.png"))


def test_a_gateway_that_fetches_opens_nothing_on_its_machine(tmp_path: Path) -> None:
    with real_daemon("--http", "0", "--http-fetch-pictures", "--mmproj", str(projector_file(tmp_path))) as daemon:
        url = f"{daemon.http_url()}/v1/chat/completions"

        def refusal(picture: str) -> httpx.Response:
            parts = [{"type": "image_url", "image_url": {"url": picture}}]
            return httpx.post(url, json={"messages": [{"role": "user", "content": parts}]}, timeout=60)

        wanted = (
            "https://localhost/cat.png",
            "https://127.1/cat.png",
            "https://2130706433/cat.png",
            "https://[::ffff:127.0.0.1]/cat.png",
            "https://169.254.169.254/latest/meta-data",
            f"{daemon.http_url()}/metrics",
        )
        with ThreadPoolExecutor(len(wanted)) as pool:
            answers = [*pool.map(refusal, wanted)]
        for picture, answer in zip(wanted, answers, strict=True):
            assert answer.status_code == 400, picture
            error = answer.json()["error"]
            assert "has no public address" in error["message"] or "not encrypted" in error["message"], error
            assert error["param"] == "messages[0].content[0].image_url.url"
        for part, status in (
            ({"type": "image", "url": url}, 400),
            ({"type": "text", "text": "a", "url": 5, "parameter": 5}, 200),
        ):
            body = {"messages": [{"role": "user", "content": [part]}], "stream": False, "max_tokens": 4}
            answer = httpx.post(f"{daemon.http_url()}/v1/generate", json=body, timeout=60)
            assert answer.status_code == status, answer.text
