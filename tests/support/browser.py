"""Headless Chromium, driven by playwright; and a load to look at in it."""

from __future__ import annotations

import contextlib
import random
import shutil
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import httpx

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
NOT_SEEN = "--disable-features=WebUIOmniboxPopup,WebUIOmniboxAimPopup"
"""Each new page would also get a process for the list under the address bar, which takes more time than most pages."""
ACTION_MS = 60_000
"""How long an action of a page may take, on a busy machine."""


def find_chromium() -> str | None:
    """Path of a browser."""
    return next((found for name in NAMES if (found := shutil.which(name)) is not None), None)


@contextlib.contextmanager
def opened_browser() -> Iterator[Browser]:
    """A browser.  Its microphone hears beeps."""
    from playwright.sync_api import sync_playwright

    flags = ["--no-sandbox", NOT_SEEN, "--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=flags)
        try:
            yield browser
        finally:
            browser.close()


@contextlib.contextmanager
def opened_page(*, width: int = 1280, height: int = 800, **options: object) -> Iterator[Page]:
    """An empty page of a browser of its own.

    Args:
        options: of playwright's ``new_page``, such as ``color_scheme``.
    """
    with opened_browser() as browser:
        page = browser.new_page(viewport={"width": width, "height": height}, **options)  # type: ignore[arg-type]
        page.set_default_timeout(ACTION_MS)
        yield page


@contextlib.contextmanager
def load(url: str, n_clients: int) -> Iterator[None]:
    """Clients that ask questions of several lengths, until the context ends."""
    ended = threading.Event()

    def run(i: int) -> None:
        chance = random.Random(i)
        session = {"session_id": f"chat-{i}"} if i % 3 == 0 else {}
        with httpx.Client(timeout=120) as client:
            while not ended.wait(chance.random()):
                long = "Repeat after me: " + "the quick brown fox jumps over the lazy dog. " * chance.randint(20, 90)
                question = chance.choice(["Tell me a story about a fox.", "Count from 1 to 60.", long])
                messages = [{"role": "user", "content": question}]
                body = {"messages": messages, "max_tokens": chance.randint(60, 300), **session}
                with (
                    contextlib.suppress(httpx.HTTPError),
                    client.stream("POST", f"{url}/v1/generate", json=body) as answer,
                ):
                    for _ in answer.iter_raw():
                        if ended.is_set():
                            break

    threads = [threading.Thread(target=run, args=(i,)) for i in range(n_clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()
