"""The chat page in headless Chromium, with a real daemon; and the libraries that come with it."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import json
import os
import re
import signal
import statistics
import wave
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from click.testing import CliRunner

from tests.gateway.conftest import TIMEOUT_S, Gateway
from tests.support.pictures import drawn, png
from tests.support.profile import amount
from tests.support.projectors import projector_file
from tests.support.real_daemon import LONG_CTX, free_port, missing, real_daemon, started, wait_ready
from tests.support.sounds import wav
from uma_trio.cli import main
from uma_trio.gateway.pages import CHAT

pytest.importorskip("playwright", reason="needs playwright: pip install playwright")

from playwright.sync_api import Browser, Page, Route, expect

from tests.support.browser import ACTION_MS, find_chromium, opened_browser

needs_browser = pytest.mark.skipif(find_chromium() is None, reason="needs Chromium: apt-get install chromium")

AXE = Path(__file__).parents[2] / "build" / "axe-core" / "axe.min.js"
HOSTILE = (
    '<img src=x onerror="window.owned=1"><script>window.owned=1</script>\n\n'
    "[a](javascript:window.owned=1)\n\n![b](https://example.com/c.png)\n\n| x | y |\n|---|---|\n| 1 | `2` |"
)
LONG = "Count from 1 to 900."
SHOWS_THE_SESSION = """async () => {
    const body = JSON.stringify({ session_id: decodeURIComponent(location.hash.slice(1)) });
    const headers = { "Content-Type": "application/json" };
    const found = await (await fetch("v1/session/read", { method: "POST", headers, body })).json();
    const shown = document.querySelector("article:last-child .text").textContent.trim();
    return !found.session.busy && shown === found.messages.at(-1).content.trim();
}"""

SHOWS_THE_TOKENS = """async () => {
    const body = JSON.stringify({ session_id: decodeURIComponent(location.hash.slice(1)) });
    const headers = { "Content-Type": "application/json" };
    const found = await (await fetch("v1/session/read", { method: "POST", headers, body })).json();
    const { completion_tokens } = found.messages.at(-1).generation.usage;
    return document.querySelector("article:last-child .figures").textContent.startsWith(`${completion_tokens} tokens`);
}"""

SHOWS_TWO_BRANCHES = "async () => document.querySelector('.switcher').textContent.includes('1 of 2')"
NO_SESSION = """async () => {
    const { sessions } = await (await fetch("v1/sessions")).json();
    return sessions.length === 0;
}"""
ONE_SESSION = """async () => {
    const { sessions } = await (await fetch("v1/sessions")).json();
    return sessions.length === 1;
}"""

expect.set_options(timeout=ACTION_MS)


def test_libraries_are_what_their_list_says() -> None:
    listed = json.loads((CHAT / "vendor" / "libraries.json").read_text())
    for each in listed:
        content = (CHAT / "vendor" / each["file"]).read_bytes()
        assert hashlib.sha256(content).hexdigest() == each["sha256"], each["file"]
        assert (CHAT / "vendor" / each["licence_file"]).read_text().strip()
    names = {each.name for each in (CHAT / "vendor").iterdir()} - {"libraries.json"}
    assert names == {each[name] for each in listed for name in ("file", "licence_file")}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for all tests of this file; each test has a context of its own in it."""
    with opened_browser() as browser:
        yield browser


@contextlib.contextmanager
def opened(browser: Browser, url: str, **options: Any) -> Iterator[Page]:
    """The page.  At the end there must have been no error, and no request to somewhere else."""
    context = browser.new_context(**options)
    context.set_default_timeout(ACTION_MS)
    wrong: list[str] = []
    context.on("request", lambda made: None if made.url.startswith((url, "blob:")) else wrong.append(made.url))
    context.on("weberror", lambda error: wrong.append(str(error.error)))
    context.on("console", lambda said: wrong.append(said.text) if "Content Security Policy" in said.text else None)
    page = context.new_page()
    page.goto(f"{url}/chat")
    expect(page.locator("#model")).to_have_value("embedded")
    yield page
    owned = [each.evaluate("() => window.owned ?? null") for each in context.pages]
    context.close()
    assert wrong == []
    assert not any(owned)


@pytest.fixture
def page(gateway: Gateway, browser: Browser) -> Iterator[Page]:
    """The page, without sessions, also those of other tests that share the gateway: the page lists them all."""
    close_sessions(gateway)
    with opened(browser, gateway.url) as page:
        yield page
    close_sessions(gateway)


def close_sessions(gateway: Gateway) -> None:
    def sessions() -> list[str]:
        return [each["session_id"] for each in client.get("/v1/sessions").raise_for_status().json()["sessions"]]

    with gateway.http() as client:
        for each in sessions():
            client.post("/v1/session/stop", json={"session_id": each})
        gateway.daemon.settled()
        for each in sessions():
            client.post("/v1/session/close", json={"session_id": each}).raise_for_status()
        assert sessions() == []


def wait_until(page: Page, found: str) -> None:
    """Wait until an async function of the page returns true; ``wait_for_function`` takes its promise for that."""
    for _ in range(ACTION_MS // 100):
        if page.evaluate(found):
            return
        page.wait_for_timeout(100)
    raise AssertionError(f"not true: {found}")


def send(page: Page, text: str) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def ask(page: Page, text: str) -> None:
    send(page, text)
    expect(page.locator("#status")).to_have_text("The answer is complete")
    expect(page.locator("#stop")).to_be_hidden()


def last(page: Page, role: str = "assistant") -> Any:
    return page.locator(f"article.{role}").last


def tokens_of_answer(page: Page) -> int:
    return int(last(page).locator(".figures").inner_text().partition(" ")[0].replace(",", ""))


def sent(page: Page, text: str) -> dict[str, Any]:
    """Ask, and return the request."""
    with page.expect_request("**/v1/session/answer") as made:
        ask(page, text)
    found: Any = made.value.post_data_json
    return dict(found)


# -- conversations --


@needs_browser
def test_a_conversation_survives_a_reload_and_appears_in_other_tabs(page: Page, gateway: Gateway) -> None:
    other = page.context.new_page()
    other.goto(f"{gateway.url}/chat")
    expect(other.locator("#model")).to_have_value("embedded")
    ask(page, "Hello, my name is Ada.")
    other.click("text=Hello, my name is Ada.")
    expect(other.locator("article")).to_have_count(2)
    ask(page, "What is my name?")
    expect(last(page).locator(".text")).to_contain_text("Ada")
    expect(last(page).locator(".figures")).to_contain_text(re.compile(r"tokens/s.*prompt tokens cached"))
    expect(other.locator("article")).to_have_count(4)
    figures = page.locator(".figures").all_text_contents()
    assert len(figures) == 2
    expect(other.locator(".figures")).to_have_text(figures)
    page.reload()
    expect(page.locator("article")).to_have_count(4)
    expect(page.locator(".figures")).to_have_text(figures)
    other.once("dialog", lambda dialog: dialog.accept())
    other.click("#delete")
    expect(other.locator("#list li")).to_have_count(0)
    expect(page.locator("#status")).to_have_text("This conversation was deleted elsewhere.")
    expect(page.locator("article")).to_have_count(4)
    send(page, "Who am I?")
    expect(page.locator("#status")).to_contain_text("Begin a new chat")
    expect(page.locator("#prompt")).to_have_value("Who am I?")
    wait_until(page, NO_SESSION)


@needs_browser
def test_titles_search_and_deletion(page: Page) -> None:
    expect(page.locator("#rename, #export, #delete").and_(page.locator(":disabled"))).to_have_count(3)
    ask(page, "What is the capital of France?")
    page.once("dialog", lambda dialog: dialog.accept("Städte"))
    page.click("#rename")
    expect(page.locator("#list")).to_contain_text("Städte")
    expect(page).to_have_title("Städte · Chat")
    page.fill("#search", "nothing like it")
    expect(page.locator("#list li")).to_have_text("Nothing found")
    expect(page).to_have_title("Städte · Chat")
    page.fill("#search", "STÄDTE")
    expect(page.locator("#list li")).to_have_count(1)
    page.once("dialog", lambda dialog: dialog.accept())
    page.click("#delete")
    expect(page.locator("#list li")).to_have_text("Nothing found")
    expect(page.locator("article")).to_have_count(0)
    expect(page).to_have_title("Chat")


WATCH_CHANGES = """() => {
    window.seen = { updates: 0, elsewhere: [], nodes: 0 };
    const watch = (records) => {
        const answers = records.filter(({ target }) => target.parentElement?.closest("article:last-child"));
        const others = records.filter(({ target }) => !target.parentElement.closest("article:last-child, #status, main > :not(#messages)"));
        seen.updates += answers.length > 0;
        seen.elsewhere.push(...others.map(({ target }) => target.outerHTML.slice(0, 200)));
        seen.nodes = Math.max(seen.nodes, answers.reduce((n, each) => n + each.addedNodes.length, 0));
    };
    new MutationObserver(watch).observe(document.querySelector("main"), { childList: true, characterData: true, subtree: true });
}"""


@pytest.mark.thorough
@needs_browser
def test_five_hundred_messages_stay_smooth(browser: Browser, tmp_path: Path) -> None:
    """No task takes 50 ms of the page's thread, whatever else the machine does."""
    if (reason := missing()) is not None:
        pytest.skip(reason)
    messages = [{"role": role, "content": f"*{i}*"} for i in range(250) for role in ("user", "assistant")]
    with real_daemon(*LONG_CTX, "--http", "0", "--parallel", "1", "--ctx", "8192", folder=tmp_path) as daemon:
        body = {"messages": messages[:-1], "session_id": "chat-many", "stream": False, "max_tokens": 5}
        httpx.post(f"{daemon.http_url()}/v1/generate", json=body, timeout=120).raise_for_status()
        with opened(browser, daemon.http_url()) as page:
            check_that_an_answer_is_smooth(page, len(messages))
            check_that_a_question_that_waits_says_so(page)


def make_answers_long(page: Page, max_tokens: int = 2000) -> None:
    set_sampling(page, ignore_eos=True, max_tokens=max_tokens)


def set_sampling(page: Page, **sampling: float) -> None:
    page.evaluate("kept => localStorage.setItem('uma-trio settings', kept)", json.dumps({"sampling": sampling}))
    page.reload()
    expect(page.locator("#model")).to_have_value("embedded")


def check_that_an_answer_is_smooth(page: Page, n_before: int) -> None:
    page.goto(f"{page.url}#chat-many")
    make_answers_long(page)
    expect(page.locator("article")).to_have_count(n_before)
    expect(page.locator("article em").last).to_be_in_viewport()
    send(page, "Tell me a story.")
    expect(page.locator("#status")).to_have_text("Answering")
    assert page.context.browser is not None
    page.context.browser.start_tracing(page=page, categories=["-*", "toplevel", "devtools.timeline"])
    page.evaluate(WATCH_CHANGES)
    page.wait_for_function("() => seen.updates >= 40")
    seen, events = page.evaluate("() => seen"), json.loads(page.context.browser.stop_tracing())["traceEvents"]
    main = {
        (e["pid"], e["tid"]) for e in events if e["name"] == "thread_name" and e["args"]["name"] == "CrRendererMain"
    }
    tasks_us = [
        e["tdur"] for e in events if e["name"].endswith("RunTask") and "tdur" in e and (e["pid"], e["tid"]) in main
    ]
    assert seen["elsewhere"] == []
    assert seen["nodes"] <= 10
    assert len(tasks_us) > seen["updates"]
    print(f"{len(tasks_us)} tasks of the page's thread, the longest {max(tasks_us) / 1e3:.1f} ms")
    assert max(tasks_us) < 50_000


def check_that_a_question_that_waits_says_so(running: Page) -> None:
    """The daemon answers one request at a time, and that of ``running`` is long."""
    running.click("#stop")
    running.click("#new")
    make_answers_long(running, 8000)
    send(running, "Tell me a story.")
    expect(running.locator("#status")).to_have_text("Answering")
    waiting = running.context.new_page()
    waiting.goto(running.url.partition("#")[0])
    expect(waiting.locator("#model")).to_have_value("embedded")
    waiting.set_viewport_size({"width": 900, "height": 600})
    send(waiting, "Hello")
    expect(waiting.locator("#status")).to_have_text("Next in the queue")
    expect(waiting.locator(".wait")).to_have_text(re.compile("^Begins (in about|any moment)"))
    expect(waiting.locator("#steering")).to_be_hidden()
    expect(waiting.locator("#list button").first).to_have_text("… Hello")
    waiting.reload()
    expect(waiting.locator("#status")).to_have_text("Next in the queue")
    expect(waiting.locator(".wait")).to_have_count(1)
    running.click("#stop")
    expect(last(waiting).locator(".text")).not_to_be_empty()
    expect(waiting.locator(".wait")).to_have_count(0)
    waiting.click("#stop")
    expect(waiting.locator("#status")).to_have_text("Stopped")
    waiting.close()


# -- one answer --


@needs_browser
def test_an_answer_is_changed_while_it_is_written(page: Page) -> None:
    make_answers_long(page)
    expect(page.locator("#steering")).to_be_hidden()
    send(page, LONG)
    expect(last(page).locator(".text")).to_contain_text("3")
    expect(page.locator("#steering button:visible")).to_have_count(4)
    page.fill("#prompt", "and 4711 is a number.")
    page.press("#prompt", "Enter")
    expect(page.locator("#status")).to_contain_text("The answer is still running")
    page.press("#prompt", "Control+Enter")
    expect(page.locator("#prompt")).to_have_value("")
    expect(last(page).locator(".text")).to_contain_text("and 4711 is a number.")
    page.fill("#prompt", "What is the capital of France?")
    page.click("#interrupt")
    expect(page.locator("article.user .text")).to_have_text([LONG, "What is the capital of France?"])
    expect(page.locator("article.assistant .text")).to_have_text(
        [re.compile("and 4711 is a number."), re.compile("^The capital of France is Paris.")]
    )
    page.once("dialog", lambda dialog: dialog.accept("100000000"))
    page.click("#bound")
    expect(page.locator("#status")).to_contain_text("max_tokens")
    page.once("dialog", lambda dialog: dialog.accept("3"))
    page.focus("#bound")
    page.keyboard.press("Enter")
    expect(page.locator("#status")).to_have_text("The answer is complete")
    expect(last(page).locator(".figures")).to_contain_text("cut off at the limit")
    expect(page.locator("#steering")).to_be_hidden()
    expect(page.locator("#prompt")).to_be_focused()
    page.reload()
    expect(page.locator("article .text")).to_have_text(
        [LONG, re.compile("4711"), "What is the capital of France?", re.compile("Paris")]
    )
    send(page, "Tell me a story about a fox named Ivo.")
    expect(last(page).locator(".text")).not_to_be_empty()
    page.click("#end-sentence")
    expect(page.locator("#status")).to_have_text("The answer is complete")
    expect(last(page).locator(".text")).to_have_text(re.compile(r"[.!?]\W*$"))
    assert last(page).locator(".text").inner_text().count(".") <= 4


@needs_browser
def test_an_answer_survives_a_reload_in_its_middle_and_can_be_stopped_and_continued(page: Page) -> None:
    send(page, LONG)
    expect(last(page).locator(".text")).to_contain_text("3")
    page.reload()
    expect(page.locator("article.user .text")).to_have_text(LONG)
    expect(last(page).locator(".text")).to_contain_text("1, 2, 3")
    before = last(page).locator(".text").inner_text()
    page.wait_for_function(
        "before => document.querySelector('article:last-child .text').innerText.length > before", arg=len(before)
    )
    page.keyboard.press("Escape")
    expect(page.locator("#status")).to_have_text("Stopped")
    stopped = last(page).locator(".text").inner_text()
    n_stopped = tokens_of_answer(page)
    page.click("button:visible:text('Continue')")
    expect(page.locator("#stop")).to_be_visible()
    page.wait_for_function(
        "n => document.querySelector('article:last-child .text').innerText.length > n", arg=len(stopped)
    )
    page.click("#stop")
    expect(page.locator("#status")).to_have_text("Stopped")
    wait_until(page, SHOWS_THE_SESSION)
    whole = last(page).locator(".text").inner_text()
    assert whole.startswith(stopped)
    wait_until(page, SHOWS_THE_TOKENS)
    assert tokens_of_answer(page) > n_stopped + 1
    page.reload()
    expect(page.locator("article")).to_have_count(2)
    expect(last(page).locator(".text")).to_have_text(whole)


@pytest.mark.thorough
@needs_browser
def test_kills_of_gateway_and_daemon_lose_nothing(browser: Browser, tmp_path: Path) -> None:
    """Answers go on without the gateway, and with the next daemon."""
    if (reason := missing()) is not None:
        pytest.skip(reason)
    flags = ("--http", str(free_port()), "--parallel", "1", "--ctx", "8192")
    with contextlib.ExitStack() as stack:
        with started(*flags, socket=tmp_path / "uma.sock", log_file=tmp_path / "log") as daemon:
            wait_ready(daemon)
            page = stack.enter_context(opened(browser, daemon.http_url()))
            make_answers_long(page)
            send(page, LONG)
            expect(last(page).locator(".text")).to_contain_text("1, 2, 3")
            os.kill(daemon.metrics()["gateway"]["pid"], signal.SIGKILL)
            expect(page.locator("#status")).to_contain_text("The connection was lost")
            expect(page.locator("#status")).to_have_text("Answering")
            expect(last(page).locator(".text")).to_contain_text("1, 2, 3")
            page.click("#stop")
            expect(page.locator("#status")).to_have_text("Stopped")
            page.click("#new")
            send(page, LONG)
            expect(last(page).locator(".text")).to_contain_text("1, 2, 3")
            page.once("dialog", lambda dialog: dialog.accept("Numbers"))
            page.click("#rename")
            expect(page.locator("#list button")).to_have_text(["… Numbers", LONG])
            processes = daemon.processes  # its children end with it, and one of them has the port
            daemon.signal(signal.SIGKILL)
            daemon.wait()
            psutil.wait_procs(processes, timeout=TIMEOUT_S)
        (tmp_path / "log").unlink()
        with real_daemon(*flags, folder=tmp_path):
            expect(page.locator("#status")).to_have_text("Answering")
            expect(last(page).locator(".text")).to_contain_text("1, 2, 3")
            page.reload()
            expect(last(page).locator(".text")).to_contain_text("1, 2, 3")
            expect(page.locator("#list button")).to_have_text(["… Numbers", LONG])
            page.click("#stop")
            expect(page.locator("#status")).to_have_text("Stopped")
            expect(page.locator("#list button")).to_have_text(["Numbers", LONG])
            expect(page.locator("#prompt")).to_have_value("")
            stack.close()


@needs_browser
def test_an_answer_goes_on_while_another_conversation_is_open(page: Page) -> None:
    send(page, LONG)
    expect(last(page).locator(".text")).to_contain_text("3")
    page.click("#new")
    expect(page.locator("article")).to_have_count(0)
    ask(page, "What is the capital of France?")
    page.click(f"#list button:has-text('{LONG}')")
    expect(last(page).locator(".text")).to_contain_text("1, 2, 3")
    page.click("#stop")
    expect(page.locator("#status")).to_have_text("Stopped")


@needs_browser
def test_a_connection_that_is_lost_in_an_answer_is_found_again(page: Page) -> None:
    lost = """() => {
        const read = ReadableStreamDefaultReader.prototype.read;
        let n = 0;
        ReadableStreamDefaultReader.prototype.read = function () {
            if (++n !== 8) return read.call(this);
            window.wasLost = true;
            return Promise.reject(new TypeError("network error"));
        };
    }"""
    page.evaluate(lost)
    send(page, LONG)
    page.wait_for_function("() => window.wasLost")
    expect(page.locator("#status")).to_have_text("Answering")
    expect(page.locator("article")).to_have_count(2)
    page.click("#stop")
    expect(page.locator("#status")).to_have_text("Stopped")
    wait_until(page, SHOWS_THE_SESSION)


@needs_browser
def test_reasoning_is_folded_and_calls_are_shown(page: Page) -> None:
    """With an answer that is written here, because whether a model calls is up to it."""
    call = {"id": "c1", "name": "get_weather", "arguments": {"city": HOSTILE}}
    usage: Any = {"prompt_tokens": 9, "completion_tokens": 5, "cached_tokens": 0}
    events: list[dict[str, Any]] = [
        {"event": "request", "messages": []},
        {"event": "reasoning", "text": "The weather is needed."},
        {"event": "token", "text": "I look."},
        {"event": "tool_call", "call": 0, "call_id": "c1", "name": "get_weather"},
        {"event": "eos", "usage": usage, "timings": {"total_ms": 1.0}, "reason": "tool_calls", "tool_calls": [call]},
    ]
    body = "".join(f"event: {each['event']}\ndata: {json.dumps(each)}\n\n" for each in events)
    page.route("**/v1/session/answer", lambda route: route.fulfill(content_type="text/event-stream", body=body))
    ask(page, "What is the weather?")
    reasoning, calls = last(page).locator("details").all()
    expect(reasoning.locator(".text")).to_be_hidden()
    expect(reasoning.locator(".text")).to_have_text("The weather is needed.")
    calls.locator("summary").click()
    expect(calls).to_contain_text("get_weather")
    expect(calls).to_contain_text("<script>")
    assert page.locator("main img, main script").count() == 0


@needs_browser
def test_calls_of_tools_are_answered_by_hand(page: Page) -> None:
    def force_calls(route: Route) -> None:
        asked: Any = route.request.post_data_json
        route.continue_(post_data=json.dumps({**asked, "tool_choice": "required"}))

    page.click("#settings-open")
    page.click("summary:text('Tools')")
    page.fill("#tools", "[{}]")
    page.click("button:text-is('Save')")
    expect(page.locator("#settings-error")).to_contain_text("The tools must be a list of objects")
    page.fill("#tools", "")
    page.click("#add-time")
    page.click("button:text-is('Save')")
    page.route("**/v1/session/answer", force_calls, times=1)
    ask(page, "What time is it?")
    field = page.locator(".results textarea").first
    expect(field).to_have_value(re.compile("GMT"))
    page.reload()
    expect(field).to_have_value(re.compile("GMT"))
    for each in page.locator(".results textarea").all():
        each.fill("Noon")
    page.route("**/v1/session/answer", lambda route: route.abort(), times=1)
    page.click(".results button")
    expect(page.locator("#status")).to_have_text("The connection was lost.")
    expect(field).to_have_value("Noon")
    with page.expect_request("**/v1/session/answer") as made:
        page.click(".results button")
    expect(page.locator("#status")).to_have_text("The answer is complete")
    body: Any = made.value.post_data_json
    assert [each["name"] for each in body["tools"]] == ["current_time"]
    assert {(each["role"], each["content"]) for each in body["messages"]} == {("tool", "Noon")}
    page.reload()
    last(page, "tool").locator("summary").click()
    expect(last(page, "tool")).to_contain_text("Result of current_timeNoon")
    expect(page.locator(".results:visible")).to_have_count(0)


# -- branches --


@needs_browser
def test_an_edited_question_is_a_branch_and_one_can_switch(page: Page) -> None:
    ask(page, "What is the capital of France?")
    ask(page, "What is the capital of Peru?")
    last(page, "user").locator("text=Edit").click()
    page.fill(".edit textarea", "What is the capital of Spain?")
    page.reload()
    expect(page.locator(".edit textarea")).to_have_value("What is the capital of Spain?")
    page.route("**/v1/session/answer", lambda route: route.abort(), times=1)
    page.press(".edit textarea", "Enter")
    expect(page.locator("#status")).to_have_text("The connection was lost.")
    expect(page.locator(".edit textarea")).to_have_value("What is the capital of Spain?")
    expect(page.locator(".edit textarea")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#prompt")).to_be_focused()
    expect(page.locator("#status")).to_have_text("The answer is complete")
    expect(page.locator("#prompt")).to_be_focused()
    expect(page.locator(".edit")).to_have_count(0)
    expect(page.locator("article")).to_have_count(4)
    expect(last(page).locator(".text")).to_contain_text("Madrid")
    expect(page.locator("#list li")).to_have_count(1)
    expect(page.locator(".switcher")).to_have_text("‹2 of 2›")
    page.click("[aria-label='Previous branch']")
    expect(last(page).locator(".text")).to_contain_text("Lima")
    expect(page.locator(".switcher")).to_have_text("‹1 of 2›")
    expect(page.locator("[aria-label='Next branch']")).to_be_focused()
    with page.expect_response("**/v1/sessions**"):
        page.evaluate("() => dispatchEvent(new Event('focus'))")
    wait_until(page, SHOWS_TWO_BRANCHES)
    expect(page.locator("[aria-label='Next branch']")).to_be_focused()
    page.reload()
    expect(page.locator(".switcher")).to_have_text("‹1 of 2›")
    page.click("[aria-label='Next branch']")
    expect(last(page).locator(".text")).to_contain_text("Madrid")
    page.once("dialog", lambda dialog: dialog.accept())
    page.click("#delete")
    expect(page.locator("#list li")).to_have_count(0)


@needs_browser
def test_the_model_goes_on_from_an_edited_answer(page: Page) -> None:
    ask(page, "What is the capital of France?")
    expect(last(page).locator(".resume")).to_have_count(0)
    last(page).locator("text=Edit").click()
    page.fill(".edit textarea", "The capital of Peru")
    page.click("text=Go on from this")
    expect(last(page).locator(".text")).to_have_text(re.compile(r"^The capital of Peru .+\.$"))
    expect(page.locator(".switcher")).to_have_text("‹2 of 2›")
    page.click("[aria-label='Previous branch']")
    expect(last(page).locator(".text")).to_have_text("The capital of France is Paris.")


@needs_browser
def test_trying_again_computes_nothing_twice_and_says_if_the_answer_is_the_same(page: Page) -> None:
    set_sampling(page, temperature=0)
    ask(page, "What is the capital of France?")
    ask(page, "And what is the capital of Peru?")
    with page.expect_request("**/v1/session/fork"):
        last(page).locator("text=Try again").press("Enter")
    expect(page.locator("#status")).to_have_text("The same answer: raise the temperature for another one.")
    expect(page.locator("#prompt")).to_be_focused()
    expect(page.locator("article")).to_have_count(4)
    found = re.search(r"(\d+) of (\d+) prompt tokens cached", last(page).locator(".figures").inner_text())
    assert found is not None
    assert int(found[1]) > 0


@needs_browser
def test_a_branch_without_an_answer_leaves_the_conversation_as_it_was(page: Page) -> None:
    ask(page, "What is the capital of France?")
    before = page.url
    page.route("**/v1/session/answer", lambda route: route.abort())
    last(page).locator("text=Try again").click()
    expect(page.locator("#status")).to_have_text("The connection was lost.")
    expect(page.locator("article")).to_have_count(2)
    page.wait_for_url(before)
    wait_until(page, ONE_SESSION)


# -- settings --


@needs_browser
def test_settings_reach_the_daemon(page: Page) -> None:
    page.click("#settings-open")
    page.fill("#system", "Be brief.")
    page.select_option("#preset", "Precise")
    page.click("summary:text('Sampling')")
    expect(page.locator("#option-temperature")).to_have_value("0.2")
    page.fill("#option-max_tokens", "3")
    page.fill("#preset-name", "Short")
    page.click("#preset-save")
    page.press("#option-max_tokens", "Enter")
    expect(page.locator("#settings")).to_be_hidden()
    body = sent(page, "Tell me a story.")
    assert (body["max_tokens"], body["temperature"], body["top_p"]) == (3, 0.2, 0.9)
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Tell me a story."},
    ]
    expect(last(page).locator(".figures")).to_contain_text("cut off at the limit")
    page.reload()
    expect(page.locator("#model")).to_have_value("embedded")
    page.click("#settings-open")
    page.select_option("#preset", "Model's defaults")
    expect(page.locator("#option-max_tokens")).to_have_value("")
    page.select_option("#preset", "Short")
    expect(page.locator("#option-max_tokens")).to_have_value("3")
    page.fill("#system", "Be long.")
    page.click("button:text-is('Save')")
    body = sent(page, "And another one.")
    assert body["history"] == "replace"
    assert [each["role"] for each in body["messages"]] == ["system", "user", "assistant", "user"]
    expect(page.locator("article")).to_have_count(5)
    expect(page.locator("article.system")).to_contain_text("Be long.")


@needs_browser
def test_the_form_of_answers(page: Page) -> None:
    page.click("#settings-open")
    page.select_option("#form", "choices")
    page.fill("#choices", "Lima\nQuito\n")
    page.click("button:text-is('Save')")
    ask(page, "What is the capital of France?")
    expect(last(page).locator(".text")).to_have_text(re.compile("^(Lima|Quito)\\s*$"))
    page.click("#settings-open")
    page.select_option("#form", "schema")
    page.fill("#schema", "{not json")
    page.click("button:text-is('Save')")
    expect(page.locator("#settings-error")).to_contain_text("The JSON schema is not JSON")
    page.fill("#schema", json.dumps({"type": "object", "properties": {"n": {"const": 7}}, "required": ["n"]}))
    page.click("button:text-is('Save')")
    ask(page, "Hello")
    expect(last(page).locator(".text")).to_contain_text('"n": 7')


@needs_browser
def test_a_model_that_is_loading_says_how_far_it_is(page: Page) -> None:
    def answer(route: Route) -> None:
        found = route.fetch().json()
        found["data"].append({"id": "large", "status": {"value": "loading", "progress": 0.4}})
        found["data"].append({"id": "other", "status": {"value": "unloaded"}})
        found["data"].append({"id": "words", "capabilities": ["embedding"], "status": {"value": "loaded"}})
        route.fulfill(json=found)

    unavailable = {"error": {"code": "E_MODEL_UNAVAILABLE", "message": "the daemon is starting"}}
    page.route("**/v1/models", lambda route: route.fulfill(status=503, json=unavailable), times=1)
    page.reload()
    expect(page.locator("#status")).to_have_text("the daemon is starting")
    expect(page.locator("#model")).to_have_value("embedded")
    page.route("**/v1/models", answer)
    page.reload()
    expect(page.locator("#model option")).to_have_text(["embedded", "large (loading 40 %)", "other (not loaded)"])
    page.unroute("**/v1/models")
    expect(page.locator("#model option")).to_have_text(["embedded"])


# -- what is typed --


@needs_browser
def test_what_is_typed_is_kept(page: Page) -> None:
    send_later = "A question that was not sent"
    page.fill("#prompt", send_later)
    waiting: list[Route] = []
    page.route("**/chat/main.js", lambda route: waiting.append(route))
    page.reload(wait_until="commit")
    expect(page.locator("#prompt")).to_be_focused()
    page.keyboard.type("typed early")
    while not waiting:
        page.wait_for_timeout(10)
    waiting.pop().continue_()
    page.unroute("**/chat/main.js")
    expect(page.locator("#prompt")).to_have_value(f"{send_later}\ntyped early")
    page.fill("#prompt", send_later)
    page.reload()
    expect(page.locator("#prompt")).to_have_value(send_later)
    page.route("**/v1/session/answer", lambda route: route.abort())
    page.press("#prompt", "Enter")
    expect(page.locator("#status")).to_have_text("The connection was lost.")
    expect(page.locator("#prompt")).to_have_value(send_later)
    expect(page.locator("article")).to_have_count(0)


@needs_browser
def test_each_tab_keeps_what_is_typed_for_a_new_chat(page: Page, gateway: Gateway) -> None:
    def another() -> Page:
        tab = page.context.new_page()
        tab.goto(f"{gateway.url}/chat")
        expect(tab.locator("#model")).to_have_value("embedded")
        return tab

    other = another()
    for tab, text in ((page, "Of the first tab"), (other, "Of the second tab")):
        tab.fill("#prompt", text)
    for tab, text in ((page, "Of the first tab"), (other, "Of the second tab")):
        tab.reload()
        expect(tab.locator("#prompt")).to_have_value(text)
    ask(page, "Hello")
    page.click("#new")
    other.close(run_before_unload=True)
    third = another()
    expect(third.locator("#prompt")).to_have_value("Of the second tab")
    expect(page.locator("#prompt")).to_have_value("")
    expect(another().locator("#prompt")).to_have_value("")


COPIED = """async () => {
    const copied = [];
    document.addEventListener("copy", () => copied.push(getSelection().toString()));
    const pressed = document.querySelector("article.assistant .actions button");
    for (const way of ["new", "old", "none"]) {
        const clipboard = way === "new" ? { writeText: async (text) => copied.push(text) } : undefined;
        Object.defineProperty(navigator, "clipboard", { value: clipboard, configurable: true });
        if (way === "none") document.execCommand = () => false;
        pressed.focus();
        pressed.click();
        await new Promise((resolve) => setTimeout(resolve));
        copied.push(pressed.textContent, document.activeElement === pressed);
    }
    return copied;
}"""


@needs_browser
def test_a_message_is_copied_with_and_without_https(page: Page) -> None:
    ask(page, "What is the capital of France?")
    text = "The capital of France is Paris."
    assert page.evaluate(COPIED) == [
        *(text, "Copied", True),
        *(text, "Copied", True),
        *("Not copied: select the text", True),
    ]
    expect(last(page).locator(".actions button").first).to_have_text("Copy")


@needs_browser
def test_offline_and_back(page: Page) -> None:
    ask(page, "What is the capital of France?")
    page.context.set_offline(True)
    expect(page.locator("#status")).to_contain_text("You are offline")
    send(page, "What is the capital of Peru?")
    expect(page.locator("#prompt")).to_have_value("What is the capital of Peru?")
    expect(page.locator("article")).to_have_count(2)
    page.context.set_offline(False)
    expect(page.locator("#status")).to_have_text("")
    page.press("#prompt", "Enter")
    expect(page.locator("article")).to_have_count(4)
    expect(last(page).locator(".text")).to_contain_text("Lima")
    page.route("**/v1/sessions**", lambda route: route.abort())
    page.fill("#search", "nothing like it")
    expect(page.locator("#status")).to_contain_text("cannot be reached")
    page.unroute("**/v1/sessions**")
    expect(page.locator("#list li")).to_have_text("Nothing found")
    expect(page.locator("#status")).to_have_text("")
    send(page, LONG)
    expect(last(page).locator(".text")).to_contain_text("3")
    page.context.set_offline(True)
    expect(page.locator("#status")).to_contain_text("You are offline")
    page.context.set_offline(False)
    expect(page.locator("#status")).not_to_contain_text("You are offline")
    page.click("#stop")
    expect(page.locator("#status")).to_have_text("Stopped")


@needs_browser
def test_files_are_attached_and_their_tokens_counted(page: Page) -> None:
    files: Any = [
        {"name": "cities.txt", "mimeType": "text/plain", "buffer": b"Lima ``` Quito\n" * 50},
        {"name": "x.bin", "mimeType": "text/plain", "buffer": b"\x00\xff"},
        {"name": "no.txt", "mimeType": "text/plain", "buffer": b""},
    ]
    page.set_input_files("#files", files)
    expect(page.locator("#attached")).to_contain_text("cities.txt")
    expect(page.locator("#status")).to_contain_text(
        "x.bin is neither text, a PDF file, a picture nor sound. no.txt is empty."
    )
    expect(page.locator("#tokens")).to_have_text(re.compile(r"^\d[\d,]* tokens$"))
    page.reload()
    expect(page.locator("#attached li")).to_have_count(1)
    page.evaluate("() => { document.querySelector('#attached li').dataset.before = 'typed'; }")
    page.fill("#prompt", "Which")
    expect(page.locator("#attached li[data-before=typed]")).to_have_count(1)  # not made again with each key
    page.fill("#prompt", "Which of them")
    page.reload()
    expect(page.locator("#prompt")).to_have_value("Which of them")
    page.set_input_files("#files", [files[1]])
    expect(page.locator("#status")).to_contain_text("x.bin")
    page.set_input_files("#files", [{**files[0], "name": "more.txt"}])
    expect(page.locator("#status")).to_have_text("")
    page.click("[aria-label='Remove more.txt']")
    expect(page.locator("#attached li")).to_have_count(1)
    expect(page.locator("#prompt")).to_be_focused()
    body = sent(page, "Which cities?")
    [message] = body["messages"]
    assert message["content"].startswith("cities.txt:\n\n````\nLima ``` Quito\n")
    assert message["content"].endswith("````\n\nWhich cities?")
    expect(page.locator("#attached li")).to_have_count(0)
    expect(page.locator("#list li")).to_have_text("Which cities?")
    page.reload()
    expect(page.locator("article.user > .text")).to_have_text("cities.txt · 750 charactersWhich cities?")
    page.click("summary:text('cities.txt')")
    expect(page.locator("article.user details .text")).to_have_text("Lima ``` Quito\n" * 50)


PDF_PAGE = """<h1>A title — “quoted”</h1><p>Some <b>bold</b> words of a paragraph that is long enough to be wrapped at the end
of its line, because a page is not so wide.</p><table><tr><td>a<td>b</table><p style="break-before: page">Größe, fi, €5"""
PDF_TEXT = re.compile(
    "^A title — “quoted”\n\nSome bold words of a paragraph .* wide\\.\n\n?a b\n\nGröße, fi, €5$", re.DOTALL
)
READ_PDF = """async (data) => {
    const { textOfPdf } = await import("/chat/pdf.js");
    const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
    return textOfPdf(bytes.buffer).catch((error) => `Error: ${error.message}`);
}"""
MUTATE_PDF = """async ([data, n]) => {
    const { textOfPdf } = await import("/chat/pdf.js");
    let state = 1;
    const random = (below) => (state = (state * 48271) % 2147483647) % below;
    const found = new Set();
    for (let i = 0; i < n; i++) {
        const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
        for (let j = random(30); j >= 0; j--) bytes[random(bytes.length)] = random(256);
        await textOfPdf(bytes.slice(0, i % 3 ? bytes.length : random(bytes.length)).buffer).catch((error) => found.add(error.constructor.name));
    }
    return [...found];
}"""


def pdf(content: bytes, *more: bytes) -> bytes:
    """A PDF file of one page, without a table of its objects, which is not read."""
    page = b"<< /Type /Page /Contents 4 0 R /Resources << /Font << /F 5 0 R >> /XObject << /X 6 0 R >> >> >>"
    pages = b"<< /Type /Pages /Kids [3 0 R 2 0 R 3 0 R] >>"
    font = b"<< /Type /Font /Subtype /Type1 /Encoding << /Differences [65 /fi /uni20AC] >> >>"
    objects = [b"<< /Type /Catalog /Pages 2 0 R >>", pages, page, content, font, *more]
    return b"%PDF-1.4\n" + b"".join(b"%d 0 obj %s endobj\n" % (i, each) for i, each in enumerate(objects, 1))


def stream(content: bytes, fields: bytes = b"") -> bytes:
    return b"<< %s /Length 1 >> stream\n%s\nendstream" % (fields, content)


@needs_browser
def test_the_text_of_pdf_files(page: Page) -> None:
    def read(content: bytes) -> str:
        return str(page.evaluate(READ_PDF, base64.b64encode(content).decode()))

    with page.context.new_page() as printed:
        printed.set_content(PDF_PAGE)
        made = printed.pdf()
    page.set_input_files("#files", [{"name": "a.pdf", "mimeType": "application/pdf", "buffer": made}])
    expect(page.locator("#attached")).to_contain_text("a.pdf")
    [message] = sent(page, "What is it?")["messages"]
    assert PDF_TEXT.match(message["content"].removeprefix("a.pdf:\n\n```\n").removesuffix("\n```\n\nWhat is it?"))

    drawn = rb"BT /F 10 Tf 10 700 Td (AB \(x\) \101) Tj 0 -12 TD [(12) -500 <3334>] TJ T* (z) ' ET /X Do"
    assert (
        read(pdf(stream(drawn), stream(b"BT /F 9 Tf (form) Tj ET", b"/Subtype /Form")))
        == "fi€ (x) fi\n12 34\n\nz\n\nform"
    )
    packed = base64.a85encode(zlib.compress(drawn)) + b"~>"
    assert read(pdf(stream(packed, b"/Filter [/ASCII85Decode /FlateDecode]"))).startswith("fi€ (x) fi")
    bomb = zlib.compress(b" " * (65 << 20), 9)
    assert read(pdf(stream(bomb, b"/Filter /FlateDecode"))) == "Error: it is too large"
    assert read(pdf(stream(b"[" * 1000))) == "Error: it is nested too deep"
    assert read(pdf(stream(b"/X Do " * 3), stream(b"/X Do " * 3, b"/Subtype /Form"))).startswith(
        "Error: it has no text"
    )
    assert read(b"%PDF-1.4 trailer << /Encrypt 9 0 R >>") == "Error: it is encrypted"
    assert read(b"PK") == "Error: it is no PDF file"
    assert read(made[:200]) == "Error: it is damaged"
    many = b"<< /Type /Pages /Kids [%s] >>" % b" ".join(b"%d 0 R" % i for i in range(10, 20_000))
    pages = b"".join(b"%d 0 obj << /Type /Page /Contents 4 0 R >> endobj\n" % i for i in range(10, 20_000))
    hostile = pdf(stream(b"ID " * (1 << 20))).replace(b"<< /Type /Pages /Kids [3 0 R 2 0 R 3 0 R] >>", many) + pages
    page.clock.install()
    with page.expect_event("worker") as began:
        page.set_input_files("#files", [{"name": "b.pdf", "mimeType": "application/pdf", "buffer": hostile}])
    expect(page.locator("#status")).to_have_text("Reading b.pdf")
    with began.value.expect_event("close", timeout=ACTION_MS):
        page.clock.fast_forward(21_000)
    expect(page.locator("#status")).to_have_text("The text of b.pdf cannot be read: it takes too long.")
    expect(page.locator("#attached li")).to_have_count(0)
    errors = page.evaluate(MUTATE_PDF, [base64.b64encode(made).decode(), amount(quick=60, thorough=2000)])
    assert set(errors) <= {"Error", "RangeError"}


@needs_browser
def test_a_megabyte_that_is_pasted_becomes_a_file_and_is_refused_without_a_loss(page: Page) -> None:
    page.evaluate(
        """() => {
            const data = new DataTransfer();
            data.setData("text/plain", "lorem ipsum ".repeat(90000));
            document.getElementById("prompt").dispatchEvent(new ClipboardEvent("paste", { clipboardData: data, cancelable: true }));
        }"""
    )
    expect(page.locator("#attached")).to_contain_text("1,080,000 characters")
    expect(page.locator("#tokens")).to_contain_text("this daemon takes")
    page.press("#prompt", "Enter")
    expect(page.locator("#status")).to_contain_text("this daemon takes")
    expect(page.locator("#attached")).to_contain_text("1,080,000 characters")
    page.reload()
    expect(page.locator("#attached")).to_contain_text("1,080,000 characters")
    page.evaluate("() => { Storage.prototype.setItem = () => { throw new DOMException('full'); }; }")
    with page.expect_response("**/v1/session/answer"):
        page.press("#prompt", "Enter")
    expect(page.locator("#status")).to_have_text("This is too long to be kept when the page is closed.")
    expect(page.locator("#attached")).to_contain_text("1,080,000 characters")


# -- pictures --

HAND_OVER = """([way, data]) => {
    const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
    const given = new DataTransfer();
    given.items.add(new File([bytes], `${way}.png`, { type: "image/png" }));
    const event = way === "drop"
        ? new DragEvent("drop", { dataTransfer: given, cancelable: true, bubbles: true })
        : new ClipboardEvent("paste", { clipboardData: given, cancelable: true, bubbles: true });
    document.getElementById("prompt").dispatchEvent(event);
}"""
COLOUR = "canvas => [...canvas.getContext('2d').getImageData(canvas.width / 2, canvas.height / 2, 1, 1).data]"


def filled(colour: tuple[int, int, int], height: int = 40, width: int = 60) -> bytes:
    """A PNG file of one colour."""
    pixels = drawn(1, height, width)
    pixels[:] = colour
    return png(pixels)


def hand_over(page: Page, way: str, picture: bytes) -> None:
    """Drop or paste a picture."""
    page.evaluate(HAND_OVER, [way, base64.b64encode(picture).decode()])


@pytest.fixture
def blind(browser: Browser, tmp_path: Path) -> Iterator[Page]:
    """The page of a daemon whose model cannot see pictures."""
    with real_daemon(*LONG_CTX, "--http", "0", "--mmproj", "off", folder=tmp_path) as daemon:  # noqa: SIM117
        with opened(browser, daemon.http_url()) as page:
            yield page


@needs_browser
def test_pictures_are_sent_kept_and_part_of_branches(page: Page) -> None:
    red, blue, large = filled((255, 0, 0)), filled((0, 0, 255)), png(drawn(1, 700, 2100))
    hand_over(page, "drop", red)
    hand_over(page, "paste", blue)
    expect(page.locator("#attached li")).to_have_text(["drop.png×", "paste.png×"])
    page.set_input_files("#files", [{"name": "large.png", "mimeType": "image/png", "buffer": large}])
    expect(page.locator("#attached li")).to_have_count(3)
    page.reload()
    expect(page.locator("#attached canvas")).to_have_count(3)
    [message] = sent(page, "What is on them?")["messages"]
    *pictures, text = message["content"]
    assert text == {"type": "text", "text": "What is on them?"}
    assert [each["type"] for each in pictures] == ["image"] * 3
    first, second, third = (base64.b64decode(each["data"]) for each in pictures)
    assert (first, second) == (red, blue)
    assert third.startswith(b"\xff\xd8")
    assert len(third) <= 512 * 1024 < len(large)
    page.reload()
    shown = page.locator("article.user canvas")
    expect(shown).to_have_count(3)
    wait_until(page, "async () => document.querySelector('article canvas').width === 60")
    assert [shown.nth(i).evaluate(COLOUR) for i in range(2)] == [[255, 0, 0, 255], [0, 0, 255, 255]]
    last(page, "user").locator("text=Edit").click()
    page.fill(".edit textarea", "And what is on these?")
    page.press(".edit textarea", "Enter")
    expect(page.locator("#status")).to_have_text("The answer is complete")
    expect(last(page, "user").locator(".text")).to_have_text("And what is on these?")
    expect(shown).to_have_count(3)
    expect(page.locator(".switcher")).to_have_text("‹2 of 2›")


@needs_browser
def test_a_model_that_cannot_see_and_what_is_no_picture_say_so(page: Page, blind: Page) -> None:
    hand_over(blind, "drop", filled((255, 0, 0)))
    expect(blind.locator("#status")).to_contain_text("embedded cannot see pictures. Choose a model that can")
    expect(blind.locator("#record")).to_be_hidden()
    expect(blind.locator("#attached li")).to_have_count(0)
    hand_over(page, "drop", b"GIF89a, they say")
    expect(page.locator("#status")).to_have_text("drop.png is no picture that this browser can read.")


@needs_browser
def test_sound_is_attached_recorded_played_and_sent(browser: Browser, tmp_path: Path) -> None:
    projector = projector_file(tmp_path, "qwen2a")
    beep = {"name": "beep.wav", "mimeType": "audio/wav", "buffer": wav(1, 0.5, rate=8000)}
    with (
        real_daemon(*LONG_CTX, "--http", "0", "--mmproj", str(projector), folder=tmp_path) as daemon,
        opened(browser, daemon.http_url()) as page,
    ):
        page.set_input_files("#files", [beep])
        expect(page.locator("#attached li")).to_have_text(["▶ beep.wav×"])
        page.evaluate("() => { for (let i = 0; i < 2; i++) document.getElementById('record').click(); }")
        page.click("text=End the recording")
        expect(page.locator("#attached li")).to_have_text(["▶ beep.wav×", "▶ Recording×"])
        page.reload()
        page.click("text=▶ beep.wav")
        expect(page.locator("text=▶ beep.wav")).to_be_visible()  # it has ended
        [message] = sent(page, "What is this?")["messages"]
        assert [each["type"] for each in message["content"]] == ["audio", "audio", "text"]
        with wave.open(io.BytesIO(base64.b64decode(message["content"][0]["data"]))) as made:
            assert (made.getnchannels(), made.getframerate(), made.getsampwidth()) == (1, 16000, 2)
            assert made.getnframes() == 8000
        with wave.open(io.BytesIO(base64.b64decode(message["content"][1]["data"]))) as made:
            assert made.getnframes() > 0
        page.reload()
        expect(last(page, "user").locator(".media button")).to_have_text(["▶ Sound"] * 2)
        page.set_input_files("#files", [{**beep, "name": "noise.wav", "buffer": b"RIFF"}])
        expect(page.locator("#status")).to_have_text("noise.wav is no sound that this browser can read.")


# -- everybody --


@needs_browser
def test_hostile_text_is_inert(page: Page, gateway: Gateway) -> None:
    with gateway.http() as client:
        messages = [{"role": "user", "content": HOSTILE}, {"role": "assistant", "content": HOSTILE}]
        messages.append({"role": "user", "content": "Hello"})
        body = {"messages": messages, "session_id": "chat-hostile", "history": "replace", "stream": False}
        client.post("/v1/generate", json=body).raise_for_status()
    page.goto(f"{gateway.url}/chat#chat-hostile")
    expect(page.locator("article")).to_have_count(4)
    assert page.locator("main img, main script, a[href^=javascript]").count() == 0
    expect(page.locator("article.assistant").first).to_contain_text("<script>")
    expect(page.locator("article.assistant td code").first).to_have_text("2")


@needs_browser
def test_a_conversation_opens_at_its_end_and_folds_what_is_long(page: Page, gateway: Gateway) -> None:
    """Messages that are not drawn yet have estimated heights, and this one is much higher."""
    high = "\n\n".join(map(str, range(300)))
    long = "lorem ipsum " * 130
    messages = [{"role": "user", "content": long}, {"role": "assistant", "content": high}]
    messages += [{"role": ("user", "assistant")[n % 2], "content": "Hello"} for n in range(7)]
    with gateway.http() as client:
        body = {"messages": messages, "session_id": "chat-high", "history": "replace", "stream": False, "max_tokens": 2}
        client.post("/v1/generate", json=body).raise_for_status()
    page.goto(f"{gateway.url}/chat#chat-high")
    expect(last(page).locator(".figures")).to_be_in_viewport()
    page.click("summary:text('Show all 1,560 characters')")
    expect(page.locator("article.user details .text")).to_have_text(long)


MARKDOWN = {
    "# A *b*\n\n> c\n> - d": "<h1>A <em>b</em></h1><blockquote><p>c</p><ul><li>d</li></ul></blockquote>",
    "3. a\n   - [x] b\n4. c": '<ol start="3"><li>a<ul><li>☑ b</li></ul></li><li>c</li></ol>',
    "- a\n\n- b": "<ul><li><p>a</p></li><li><p>b</p></li></ul>",
    "a &lt;b&gt; &#65; \\* **c** ~~d~~ `<e>`\nf": (
        "<p>a &lt;b&gt; A * <strong>c</strong> <del>d</del> <code>&lt;e&gt;</code><br>f</p>"
    ),
    "|a|b|\n|-|-:|\n|1|2|": (
        '<table><thead><tr><th>a</th><th class="right">b</th></tr></thead>'
        '<tbody><tr><td>1</td><td class="right">2</td></tr></tbody></table>'
    ),
    "[a](https://b/?c&d) [e](javascript:f) [g](h)": (
        '<p><a href="https://b/?c&amp;d" target="_blank" rel="noopener noreferrer">a</a> <span>e</span> <span>g</span></p>'
    ),
    "a <b onclick=c>d</b>\n\n<script>\ne\n</script>": (
        "<p>a &lt;b onclick=c&gt;d&lt;/b&gt;</p><p>&lt;script&gt;\ne\n&lt;/script&gt;</p>"
    ),
    "> " * 5000 + "a": "<blockquote>" * 32 + "&gt; " * 4968 + "a" + "</blockquote>" * 32,
    "- " * 32 + "a\n\n" + "  " * 31 + "- b": (
        f"{'<ul><li>' * 31}<ul><li><p>a</p></li><li><p>b</p></li></ul>{'</li></ul>' * 31}"
    ),
    "*a" + "[" * 200 + "b*": f"<p>*a{'[' * 200}b*</p>",  # too many marks for one part
    "**a b** " * 120 + "c": f"<p>{'<strong>a b</strong> ' * 120}c</p>",
    "|a" * 65 + "\n" + "|-" * 65 + "\n|b": f"<p>{'|a' * 65}<br>{'|-' * 65}<br>|b</p>",
    "|a" * 64 + "\n" + "|-" * 64: "<table><thead><tr>" + "<th>a</th>" * 64 + "</tr></thead><tbody></tbody></table>",
    "---\n\n```js\na < b\n```": (
        '<hr><button type="button" class="quiet copy">Copy code</button><pre tabindex="0"><code>a &lt; b</code></pre>'
    ),
}
CODE = {
    ("py", "def f(x):  # it's\n    return \"<b>\" + '''a\n''' * 0x1F"): (
        "[def] f(x):  [# it's]\n    [return] [\"<b>\"] + ['''a\n'''] * [0x1F]"
    ),
    ("js", "const a = `// ${b}\n`; /* c\n */ // d"): "[const] a = [`// ${b}\n`]; [/* c\n */] [// d]",
    ("rust", "fn f<'a>() -> char { '\\n' }"): "[fn] f<'a>() -> [char] { ['\\n'] }",
    ("sql", "SELECT 'a' -- from"): "[SELECT] ['a'] [-- from]",
    ("sh", "echo $# a#b # 'c"): "echo $# a#b [# 'c]",
    ("c", "\"a\nint b = 'c"): "[\"a]\n[int] b = ['c]",
    ("text", "return 1"): "return 1",
    ("py", "'\\" * 15_000): "['" + "\\'" * 14_999 + "]\\",  # in one go over the text
}
PIECES = """async ([language, code]) => {
    const { pieces } = await import("/chat/colours_of_code.js");
    return pieces(code, language);
}"""
MATH = {
    "a $x_1^2$ and \\(\\alpha\\)": (
        "<p>a <math><msubsup><mi>x</mi><mn>1</mn><mn>2</mn></msubsup></math> and <math><mi>α</mi></math></p>"
    ),
    "$$\n\\frac{a}{\\sqrt b}\n$$\n\nc": (
        '<span class="formula" tabindex="0"><math display="block"><mfrac><mi>a</mi><msqrt><mi>b</mi></msqrt></mfrac></math>'
        "</span><p>c</p>"
    ),
    "a\n\\[\n\\begin{matrix} 1 & - \\\\ \\mathbb{R} & \\text{a b} \\end{matrix}\n\\]\nb": (
        '<p>a</p><span class="formula" tabindex="0"><math display="block"><mtable>'
        "<mtr><mtd><mn>1</mn></mtd><mtd><mo>−</mo></mtd></mtr>"
        "<mtr><mtd><mi>ℝ</mi></mtd><mtd><mtext>a&nbsp;b</mtext></mtd></mtr></mtable></math></span><p>b</p>"
    ),
    "$5 or $10, 5 $ and `$x$`": "<p>$5 or $10, 5 $ and <code>$x$</code></p>",
    "$\\sum_{i=1}^n$": (
        '<p><math><msubsup><mo movablelimits="false">∑</mo><mrow><mi>i</mi><mo>=</mo><mn>1</mn></mrow><mi>n</mi></msubsup>'
        "</math></p>"
    ),
    "$\\constructor{a}$ $\\begin{__proto__}a\\end{__proto__}$": (
        "<p><code>$\\constructor{a}$</code> <code>$\\begin{__proto__}a\\end{__proto__}$</code></p>"
    ),
    "$\\href{javascript:a}{b}$ $\\text{<b>}$ $<a>$": (
        "<p><code>$\\href{javascript:a}{b}$</code> <math><mtext>&lt;b&gt;</mtext></math> "
        "<math><mrow><mo>&lt;</mo><mi>a</mi><mo>&gt;</mo></mrow></math></p>"
    ),
    "$$\na_1": "<code>$$\na_1</code>",
    "a\n\\[\nb_1": "<p>a</p><code>\\[\nb_1</code>",
    "a$$b": "<p>a$$b</p>",
    "$" * 3000: f"<p>{'$' * 3000}</p>",
    f"${'{' * 99}a{'}' * 99}$": f"<p><code>${'{' * 99}a{'}' * 99}$</code></p>",
}
LOOKS = """async ([text]) => {
    const { mathExtensions } = await import("/chat/math_in_markdown.js");
    const { Marked } = await import("/chat/vendor/marked.js");
    let n = 0;
    const counted = ({ tokenizer, ...each }) => ({ ...each, tokenizer(...args) { n++; return tokenizer.apply(this, args); } });
    new Marked({ extensions: mathExtensions.filter(({ level }) => level === "block").map(counted) }).lexer(text);
    return n;
}"""
SHOWN = """async ([text, step]) => {
    const { Growing } = await import("/chat/markdown.js");
    const place = document.createElement("div");
    const growing = new Growing(place);
    for (let n = step; n < text.length; n += step) growing.show(text.slice(0, n));
    growing.show(text);
    return place.innerHTML;
}"""


@needs_browser
def test_markdown_becomes_elements(page: Page) -> None:
    for text, expected in {**MARKDOWN, **MATH}.items():
        assert page.evaluate(SHOWN, [text, len(text)]).replace("\n</p>", "</p>") == expected
        assert page.evaluate(SHOWN, [text, 1 if len(text) < 1000 else 999]).replace("\n</p>", "</p>") == expected
    dollars, brackets = "$" * 3000, "\\[\n" * 3000 + "\na"
    assert page.evaluate(SHOWN, [brackets, len(brackets)]) == f"<p>{'<br>'.join('[' * 3000)}</p><p>a</p>"
    for hostile in (dollars, brackets):
        assert page.evaluate(LOOKS, [hostile]) <= 3, "what is no formula is one paragraph, and not one for each dollar"


@needs_browser
def test_code_is_coloured(page: Page) -> None:
    for (language, code), expected in CODE.items():
        found = page.evaluate(PIECES, [language, code])
        assert "".join(text for _, text in found) == code
        assert "".join(f"[{text}]" if kind else text for kind, text in found) == expected
    shown = page.evaluate(SHOWN, ["```Python\nif 1: a = '<i>'\n```", 99])
    assert shown.endswith(
        '<code><span class="keyword">if</span> <span class="number">1</span>: a = '
        "<span class=\"string\">'&lt;i&gt;'</span></code></pre>"
    )


@needs_browser
def test_the_keyboard_is_enough(page: Page) -> None:
    ask(page, "What is the capital of France?")
    page.keyboard.press("Alt+n")
    expect(page.locator("article")).to_have_count(0)
    expect(page.locator("#prompt")).to_be_focused()
    page.keyboard.press("Control+k")
    page.keyboard.type("france")
    expect(page.locator("#list li")).to_have_count(1)
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.locator("article")).to_have_count(2)
    page.focus("article.user button:text('Edit')")
    page.keyboard.press("Enter")
    expect(page.locator(".edit textarea")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator(".edit")).to_have_count(0)
    page.focus("#settings-open")
    page.keyboard.press("Enter")
    expect(page.locator("#system")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator("#settings-open")).to_be_focused()


@needs_browser
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_axe_finds_nothing_and_nothing_is_wider_than_the_window(
    gateway: Gateway, browser: Browser, page: Page, width: int, scheme: str
) -> None:
    ask(page, "What is the capital of France?")
    viewport = {"width": width, "height": 800}
    with opened(browser, gateway.url, viewport=viewport, color_scheme=scheme, bypass_csp=True) as seen:
        seen.goto(page.url)
        expect(seen.locator("article")).to_have_count(2)
        found = [*violations(seen)]
        assert seen.evaluate("() => document.documentElement.scrollWidth") <= width
        if seen.locator("#menu").is_visible():
            seen.click("#menu")
            expect(seen.locator("#search")).to_be_focused()
            seen.mouse.click(width - 10, 400)
            expect(seen.locator("#search")).to_be_hidden()
        seen.click("#settings-open")
        seen.click("summary:text('Sampling')")
        found += violations(seen)
        assert seen.evaluate("() => document.documentElement.scrollWidth") <= width
        assert found == []


def violations(page: Page) -> list[str]:
    if not AXE.exists():
        pytest.skip(f"needs {AXE.name} in build/axe-core: npm pack axe-core")
    page.add_script_tag(path=AXE)
    found = page.evaluate("async () => (await axe.run()).violations")
    return [f"{each['id']}: {node['html'][:200]}" for each in found for node in each["nodes"]]


@needs_browser
def test_the_page_is_small(gateway: Gateway, browser: Browser) -> None:
    sizes: dict[str, int] = {}
    page = browser.new_page()
    page.on("response", lambda found: sizes.update({found.url: len(found.body())}) if found.status == 200 else None)
    page.goto(f"{gateway.url}/chat")
    expect(page.locator("#model")).to_have_value("embedded")
    page.close()
    assert sum(sizes.values()) < 200 * 1024
    urls = {"a page of one word": "data:text/html,word", "the page": f"{gateway.url}/chat"}
    loads = [{name: load_ms(browser, url) for name, url in urls.items()} for _ in range(amount(quick=1, thorough=9))]
    print(f"{sum(sizes.values()):,} bytes")
    for name in urls:
        first, usable = (statistics.median(values) for values in zip(*(each[name] for each in loads), strict=True))
        print(f"{name}: first paint after {first:.0f} ms, usable after {usable:.0f} ms")


WATCH_LOAD = """
    const usable = () => location.protocol === "data:" || Boolean(document.getElementById("model")?.value);
    const seen = {};
    function look() {
        seen.paint ??= performance.getEntriesByName("first-contentful-paint")[0]?.startTime;
        if (usable()) seen.usable ??= performance.now();
        if (seen.paint && seen.usable && !seen.said) console.log(seen.said = JSON.stringify(["loaded", seen.paint, seen.usable]));
    }
    new PerformanceObserver(look).observe({ type: "paint", buffered: true });
    new MutationObserver(look).observe(document, { childList: true, subtree: true });
"""


def load_ms(browser: Browser, url: str) -> tuple[float, float]:
    """Time to the first paint, and until a model is chosen, of a load with empty caches.

    The page itself says it: a question of playwright before the first paint would delay it.
    """
    with browser.new_context() as context:
        context.add_init_script(WATCH_LOAD)
        page = context.new_page()
        with page.expect_console_message(lambda said: said.text.startswith('["loaded"')) as found:
            page.goto(url)
        _, first, usable = json.loads(found.value.text)
    return float(first), float(usable)


@needs_browser
def test_tenants_have_conversations_of_their_own(browser: Browser, tmp_path: Path) -> None:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    file = tmp_path / "keys.yaml"

    def create(name: str) -> str:
        result = CliRunner().invoke(main, ["keys", "create", name, "--file", str(file)])
        assert result.exit_code == 0, result.output
        return result.stdout.strip()

    ada, bob = create("ada"), create("bob")
    with real_daemon(*LONG_CTX, "--http", "0", "--http-keys", str(file), folder=tmp_path) as daemon:
        url = daemon.http_url()
        context = browser.new_context()
        context.set_default_timeout(ACTION_MS)
        page = context.new_page()
        page.goto(f"{url}/chat")
        expect(page.locator("#key-field")).to_be_visible()
        for key, n in ((ada, 0), (bob, 0), (ada, 1)):
            page.fill("#key-field", f"{key}?")
            page.press("#key-field", "Enter")
            expect(page.locator("#key-error")).not_to_be_empty()
            page.fill("#key-field", key)
            page.press("#key-field", "Enter")
            expect(page.locator("#model")).to_have_value("embedded")
            expect(page.locator("article")).to_have_count(0)  # of the one before, nothing is left
            expect(page.locator("#prompt")).to_have_value("")
            page.click("#new")
            expect(page.locator("#list li")).to_have_count(n)
            ask(page, "What is the capital of France?")
            page.fill("#prompt", "And of Italy?")
            page.click("#key")
        assert page.evaluate("() => Object.values(sessionStorage)") == [ada]
        page.press("#key-field", "Escape")
        page.click("#new")
        page.fill("#prompt", "Of Ada")
        page.click("#settings-open")
        page.fill("#system", "Of Ada")
        page.click("#settings .actions [value=save]")
        page.close(run_before_unload=True)
        for key, left in ((bob, ""), (ada, "Of Ada")):  # what a closed tab has left is for its own key
            page = context.new_page()
            page.goto(f"{url}/chat")
            expect(page.locator("#key-field")).to_be_visible()
            expect(page.locator("#prompt")).to_have_value("")
            page.fill("#key-field", key)
            page.press("#key-field", "Enter")
            expect(page.locator("#model")).to_have_value("embedded")
            expect(page.locator("#prompt")).to_have_value(left)
            page.click("#settings-open")
            expect(page.locator("#system")).to_have_value(left)
            page.close()
        context.close()
