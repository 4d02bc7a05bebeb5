"""The chat page in headless Chromium, with a real daemon; and the libraries that come with it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator

import pytest

from tests.gateway.conftest import Gateway
from uma_trio.gateway.pages import CHAT

pytest.importorskip("playwright", reason="needs playwright: pip install playwright")

from playwright.sync_api import Page, expect

from tests.support.browser import ACTION_MS, find_chromium, opened_page

needs_browser = pytest.mark.skipif(find_chromium() is None, reason="needs Chromium: apt-get install chromium")

HOSTILE = (
    "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>\n\n"
    "[a](javascript:document.title='owned')\n\n![b](https://example.com/c.png)\n\n| x | y |\n|---|---|\n| 1 | `2` |"
)

expect.set_options(timeout=ACTION_MS)


def test_libraries_are_what_their_list_says() -> None:
    listed = json.loads((CHAT / "vendor" / "libraries.json").read_text())
    for each in listed:
        content = (CHAT / "vendor" / each["file"]).read_bytes()
        assert hashlib.sha256(content).hexdigest() == each["sha256"], each["file"]
        assert (CHAT / "vendor" / each["licence_file"]).read_text().strip()
    names = {each.name for each in (CHAT / "vendor").iterdir()} - {"libraries.json"}
    assert names == {each[name] for each in listed for name in ("file", "licence_file")}


@needs_browser
def test_the_page_is_small(gateway: Gateway) -> None:
    sizes: list[int] = []
    with opened_page() as page:
        page.on("response", lambda found: sizes.append(len(found.body())) if found.status == 200 else None)
        page.goto(f"{gateway.url}/chat")
        expect(page.locator("#model")).to_have_value("embedded")
    assert sum(sizes) < 200 * 1024


@pytest.fixture
def page(gateway: Gateway) -> Iterator[Page]:
    """The page.  At the end there must have been no error, and no request to somewhere else."""
    with opened_page() as page:
        wrong: list[str] = []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda made: None if made.url.startswith(gateway.url) else wrong.append(made.url))
        page.goto(f"{gateway.url}/chat")
        expect(page.locator("#model")).to_have_value("embedded")
        yield page
        assert wrong == []
        assert page.title() == "Chat"
    gateway.daemon.settled()
    with gateway.http() as client:
        for each in client.get("/v1/sessions").json()["sessions"]:
            if each["session_id"].startswith("chat-"):
                client.post("/v1/session/close", json={"session_id": each["session_id"]})


def ask(page: Page, text: str) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")
    expect(page.locator("#stop")).to_be_hidden()
    expect(page.locator("article.assistant .text").last).not_to_be_empty()


@needs_browser
def test_a_conversation_survives_a_reload_and_appears_in_another_tab(page: Page, gateway: Gateway) -> None:
    ask(page, "Hello, my name is Ada.")
    ask(page, "What is my name?")
    expect(page.locator("article.assistant .text").last).to_contain_text("Ada")
    expect(page.locator(".actions").last).to_contain_text("prompt tokens cached")
    page.reload()
    expect(page.locator("article")).to_have_count(4)
    browser = page.context.browser
    assert browser is not None
    other = browser.new_page()
    other.goto(f"{gateway.url}/chat")
    other.click("text=Hello, my name is Ada.")
    expect(other.locator("article")).to_have_count(4)


@needs_browser
def test_asking_again_makes_a_branch_and_computes_nothing_twice(page: Page) -> None:
    ask(page, "What is the capital of France?")
    ask(page, "And what is the capital of Peru?")
    page.locator("article.user").last.locator("text=Try again").click()
    expect(page.locator("#list li")).to_have_count(2)
    expect(page.locator("#stop")).to_be_hidden()
    expect(page.locator("article")).to_have_count(4)
    found = re.search(r"(\d+) of (\d+) prompt tokens cached", page.locator(".actions").last.inner_text())
    assert found is not None
    assert int(found[1]) > 0


@needs_browser
def test_what_was_sent_of_a_stopped_answer_stays(page: Page) -> None:
    page.fill("#prompt", "Count from 1 to 900.")
    page.press("#prompt", "Enter")
    expect(page.locator("article.assistant .text")).to_contain_text("3")
    page.click("#stop")
    expect(page.locator("#status")).to_have_text("Stopped")
    page.wait_for_function(
        "async () => (await (await fetch('v1/sessions?contains=900')).json()).sessions.some((each) => each.turns === 1)"
    )
    page.reload()
    expect(page.locator("article.assistant .text")).to_contain_text("3")


@needs_browser
def test_hostile_text_is_inert(page: Page, gateway: Gateway) -> None:
    with gateway.http() as client:
        messages = [{"role": "user", "content": HOSTILE}, {"role": "assistant", "content": HOSTILE}]
        messages.append({"role": "user", "content": "Hello"})
        body = {"messages": messages, "session_id": "chat-hostile", "history": "replace", "stream": False}
        client.post("/v1/generate", json=body).raise_for_status()
    page.goto(f"{gateway.url}/chat#chat-hostile")
    page.reload()
    expect(page.locator("article")).to_have_count(4)
    assert page.locator("main img, main script, a[href^=javascript]").count() == 0
    expect(page.locator("article.assistant").first).to_contain_text("<script>")
    expect(page.locator("article.assistant td code").first).to_have_text("2")


@needs_browser
def test_titles_search_and_deletion(page: Page) -> None:
    ask(page, "What is the capital of France?")
    page.once("dialog", lambda dialog: dialog.accept("Städte"))
    page.click("#rename")
    expect(page.locator("#list")).to_contain_text("Städte")
    page.fill("#search", "nothing like it")
    expect(page.locator("#list li")).to_have_count(0)
    page.fill("#search", "STÄDTE")
    expect(page.locator("#list li")).to_have_count(1)
    page.once("dialog", lambda dialog: dialog.accept())
    page.click("#delete")
    expect(page.locator("#list li")).to_have_count(0)
    expect(page.locator("article")).to_have_count(0)


@needs_browser
def test_what_is_typed_is_kept(page: Page) -> None:
    page.fill("#prompt", "A question that was not sent")
    page.reload()
    expect(page.locator("#prompt")).to_have_value("A question that was not sent")
    page.route("**/v1/generate", lambda route: route.abort())
    page.press("#prompt", "Enter")
    expect(page.locator("#status")).to_have_text("The connection was lost.")
    expect(page.locator("#prompt")).to_have_value("A question that was not sent")


@needs_browser
@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_is_wider_than_the_window(gateway: Gateway, width: int) -> None:
    with opened_page(width=width, height=800) as page:
        page.goto(f"{gateway.url}/chat")
        expect(page.locator("#model")).to_have_value("embedded")
        assert page.evaluate("() => document.documentElement.scrollWidth") <= width
