"""The dashboard in headless Chromium, with a real daemon; and the feed that it shows."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from tests.gateway.conftest import Gateway
from tests.support.real_daemon import LONG_CTX, missing, real_daemon
from uma_trio.cli import main
from uma_trio.gateway.pages import FOLDER
from uma_trio.models.packaged import EMBEDDED

pytest.importorskip("playwright", reason="needs playwright: pip install playwright")

from playwright.sync_api import Browser, Page, expect

from tests.support.browser import ACTION_MS, find_chromium, load, opened_browser

needs_browser = pytest.mark.skipif(find_chromium() is None, reason="needs Chromium: apt-get install chromium")

HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"

expect.set_options(timeout=ACTION_MS)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for all tests of this file; each test has a context of its own in it."""
    with opened_browser() as browser:
        yield browser


@contextlib.contextmanager
def opened(browser: Browser, **options: Any) -> Iterator[Page]:
    """An empty page in a context of its own."""
    with browser.new_context(**options) as context:
        context.set_default_timeout(ACTION_MS)
        yield context.new_page()


@pytest.fixture
def page(gateway: Gateway, browser: Browser) -> Iterator[Page]:
    """The dashboard.  At the end there must have been no error, and no request to somewhere else."""
    with opened(browser) as page:
        wrong: list[str] = []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
        page.on("request", lambda made: None if made.url.startswith(gateway.url) else wrong.append(made.url))
        page.goto(gateway.url)
        expect(page.locator("#readiness")).to_have_text("ready")
        yield page
        assert wrong == []
        assert page.title() == "uma-trio"
    gateway.daemon.settled()


def pixels(page: Page, selector: str, colour: str) -> int:
    """How many pixels of a canvas have a colour of the style sheet."""
    found: int = page.evaluate(
        """([selector, name]) => {
            const canvas = document.querySelector(selector);
            const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", { willReadFrequently: true });
            copy.drawImage(canvas, 0, 0);
            const { data } = copy.getImageData(0, 0, canvas.width, canvas.height);
            const hex = getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
            const [r, g, b] = [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
            let n = 0;
            for (let i = 0; i < data.length; i += 4)
                n += data[i] === r && data[i + 1] === g && data[i + 2] === b && data[i + 3] === 255;
            return n;
        }""",
        [selector, colour],
    )
    return found


def wait_for_pixels(page: Page, selector: str, colour: str, least: int) -> None:
    for _ in range(ACTION_MS // 100):
        if pixels(page, selector, colour) >= least:
            return
        page.wait_for_timeout(100)
    raise AssertionError(f"fewer than {least} pixels of {selector} are {colour}")


# -- the live view --


@needs_browser
def test_streams_appear_while_a_load_runs(page: Page, gateway: Gateway) -> None:
    assert pixels(page, "#timeline", "prefill") == 0
    with load(gateway.url, 6):
        expect(page.locator("#running")).to_have_text(re.compile("[4-6]"))
        expect(page.locator("#sequences")).to_contain_text("decode")
        expect(page.locator("#sessions")).to_contain_text("chat-3")
        expect(page.locator("#tick")).to_contain_text("streams decoded")
        for name in ("used", "reserved", "cached"):
            expect(page.locator(f"#kv-{name}")).to_have_text(re.compile(rf"{name} \d+ %"))
        expect(page.locator("#itl-p50")).to_contain_text("ms")
        page.wait_for_function("() => Number(document.getElementById('tokens-rate').textContent.replace(',', '')) > 0")
        for canvas, colour, least in (
            ("timeline", "decode", 1000),
            ("timeline", "prefill", 100),
            ("kv-map", "decode", 1),
        ):
            wait_for_pixels(page, f"#{canvas}", colour, least)
        page.click("#pause")
        picture = page.evaluate("() => document.getElementById('timeline').toDataURL()")
        page.wait_for_timeout(1500)
        assert page.evaluate("() => document.getElementById('timeline').toDataURL()") == picture, "paused"
        check_that_nothing_is_wider_than_the_window(page)
        before = page.inner_text("#tick")
        page.focus("#timeline")
        for _ in range(30):  # ticks next to each other may be alike
            page.keyboard.press("ArrowLeft")
            if page.inner_text("#tick") != before:
                break
        assert page.inner_text("#tick") != before
    with gateway.http() as client:
        for i in (0, 3):
            client.post("/v1/session/close", json={"session_id": f"chat-{i}"})


def check_that_nothing_is_wider_than_the_window(page: Page) -> None:
    before = page.viewport_size
    assert before is not None
    for width, height in ((390, 844), (1280, 800)):
        page.set_viewport_size({"width": width, "height": height})
        assert page.evaluate("() => document.documentElement.scrollWidth") <= width
        if width > 1000:
            assert page.evaluate("() => document.documentElement.scrollHeight") <= height
    page.set_viewport_size(before)


@pytest.mark.thorough
@needs_browser
def test_cells_that_are_reserved_are_not_shown_as_used(page: Page, gateway: Gateway) -> None:
    with gateway.daemon.wire() as wire:
        wire.send(id="long", prompt="Tell me a story.", max_tokens=4000, ignore_eos=True)
        expect(page.locator("#kv-reserved")).to_have_text("reserved 6 %")
        shown = re.fullmatch(r"used (\d+) %", page.inner_text("#kv-used"))
        assert shown is not None
        assert int(shown[1]) < 6


@pytest.mark.thorough
@needs_browser
def test_errors_and_restarts_are_counted_and_hostile_names_stay_text(page: Page, gateway: Gateway) -> None:
    with gateway.http() as client:
        client.post("/v1/generate", json={"prompt": "x", "max_tokens": 10_000_000})
    expect(page.locator("#errors")).to_contain_text("E_LIMIT_MAX_TOKENS")
    expect(page.locator("#restarts")).to_contain_text("0 restarts")
    with gateway.http() as client:
        body = {"prompt": "x", "max_tokens": 2, "session_id": HOSTILE[:80], "stream": False}
        client.post("/v1/generate", json=body).raise_for_status()
        expect(page.locator("#sessions")).to_contain_text("<img src=x")
        client.post("/v1/session/close", json={"session_id": HOSTILE[:80]}).raise_for_status()
    assert page.locator("main img, main script").count() == 0


@pytest.mark.thorough
@needs_browser
def test_it_goes_on_after_kills_and_counts_them(browser: Browser) -> None:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    with real_daemon(*LONG_CTX, "--http", "0") as daemon, opened(browser) as page:
        page.goto(daemon.http_url())
        expect(page.locator("#readiness")).to_have_text("ready")
        os.kill(daemon.metrics()["gateway"]["pid"], signal.SIGKILL)
        expect(page.locator("#restarts tr").nth(1)).to_have_text(re.compile("gateway *1 restart"))
        os.kill(daemon.metrics()["engine"]["pid"], signal.SIGKILL)
        expect(page.locator("#restarts tr").nth(0)).to_have_text(re.compile("engine *1 restart"))
        expect(page.locator("#readiness")).to_have_text("ready")
        expect(page.locator("#notice")).to_be_hidden()


@pytest.mark.thorough
@needs_browser
def test_several_models_have_links_and_checks_of_their_own(browser: Browser, tmp_path: Path) -> None:
    second = tmp_path / "second.gguf"
    second.write_bytes(EMBEDDED.read_bytes())
    flags = ("--model", "embedded", "--model", str(second), "--ctx", "2048", "--parallel", "2", "--http", "0")
    with real_daemon(*flags, folder=tmp_path) as daemon, opened(browser) as page:
        page.goto(daemon.http_url())
        expect(page.locator("#readiness")).to_have_text("ready")
        expect(page.locator("#model")).to_have_text("embedded · second")
        expect(page.locator("#checks")).to_contain_text("model (second)")
        page.click("#model a")
        expect(page.locator("#model")).to_have_text("second · embedded")
        page.click("#to-chat")
        expect(page.locator("select#model")).to_have_value("second")


# -- keys --


@pytest.mark.thorough
@needs_browser
def test_a_gateway_with_keys_asks_for_one(browser: Browser, tmp_path: Path) -> None:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    file = tmp_path / "keys.yaml"

    def create(*args: str) -> str:
        result = CliRunner().invoke(main, ["keys", "create", *args, "--file", str(file)])
        assert result.exit_code == 0, result.output
        return result.stdout.strip()

    admin, alice = create("ops", "--admin"), create("alice")
    with real_daemon(*LONG_CTX, "--http", "0", "--http-keys", str(file)) as daemon, opened(browser) as page:
        gateway = Gateway.of(daemon)
        with gateway.http() as client:
            assert client.get("/v1/watch").status_code == 401
            assert client.get("/v1/watch", headers={"x-api-key": alice}).status_code == 403
            assert client.get("/").status_code == 200
        page.goto(gateway.url)
        expect(page.locator("#notice")).to_contain_text("needs the key of an administrator")
        expect(page.locator("#notice")).not_to_contain_text("Bearer")
        expect(page.locator("#key-field")).to_be_visible()
        page.keyboard.press("Escape")
        for key, notice in ((alice, "which yours is not"), (admin, "")):
            page.click("#key-open")
            page.fill("#key-field", key)
            page.click("#key-dialog button[value=use]")
            if notice:
                expect(page.locator("#notice")).to_contain_text(notice)
        expect(page.locator("#readiness")).to_have_text("ready")
        expect(page.locator("#notice")).to_be_hidden()
        assert page.evaluate("() => Object.values(sessionStorage)") == [admin]
        assert page.evaluate("() => localStorage.length + document.cookie.length") == 0


# -- the files and the feed, without a browser --


def test_the_files_forbid_everything_from_elsewhere(gateway: Gateway) -> None:
    with gateway.http() as client:
        for name in sorted(each.name for each in FOLDER.iterdir()):
            path = "/" if name == "index.html" else f"/dashboard/{name}"
            answer = client.get(path)
            assert answer.status_code == 200
            policy = answer.headers["content-security-policy"]
            assert policy.startswith("default-src 'none'; script-src 'self';")
            assert "unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert not re.search(r"https?://(?!www\.w3\.org/)", answer.text), "nothing comes from elsewhere"
            assert "innerHTML" not in answer.text
            again = client.get(path, headers={"if-none-match": answer.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
        assert client.head("/").status_code == 200, "how clients of Ollama look for a server"
        assert client.get("/dashboard/none.js").status_code == 404


def test_the_feed_ends_with_its_client(gateway: Gateway) -> None:
    with gateway.http() as client, client.stream("GET", "/v1/watch", params={"interval_ms": 50}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        times = []
        for line in answer.iter_lines():
            if line.startswith("data: "):
                times.append(json.loads(line[6:])["at_s"])
            if len(times) == 3:
                break
        assert times == sorted(times)
    gateway.daemon.settled()


@pytest.mark.parametrize("interval", ["", "x", "49", "60001", "-50", "٥٠"])
def test_an_interval_out_of_bounds_is_refused(gateway: Gateway, interval: str) -> None:
    with gateway.http() as client:
        answer: httpx.Response = client.get("/v1/watch", params={"interval_ms": interval})
    assert answer.status_code == 400
    assert "interval_ms" in answer.json()["error"]["message"]
