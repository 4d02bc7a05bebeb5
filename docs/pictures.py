"""Make the pictures of the README: recordings of the real commands, with the embedded model.

    python docs/pictures.py                  # all of them, in docs/
    python docs/pictures.py chat --out /tmp  # one of them, somewhere else

Needs the dev extra, and Chromium for the pages.  The machine should be idle, since the pictures show its figures.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import click
import httpx
from rich.segment import Segment
from rich.style import Style

ROOT: Final = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.support.browser import load, opened_page  # noqa: E402
from tests.support.projectors import projector_file  # noqa: E402
from tests.support.real_daemon import real_daemon  # noqa: E402
from tests.support.terminal import Terminal, terminal  # noqa: E402
from uma_trio.demo.animation import Frame, svg  # noqa: E402

UMA_TRIO: Final = (sys.executable, "-m", "uma_trio")
COLUMNS: Final = 80
KEY_S: Final = 0.04
"""Time between two keys."""
FRAME_S: Final = 0.12
"""Minimum time between two frames."""
COLOURS: Final = {"brown": "yellow", "brightbrown": "bright_yellow", "bfightmagenta": "bright_magenta"}
"""Names of pyte that are not those of rich."""


class Recording:
    """What a terminal shows, frame by frame."""

    def __init__(self, shown: Terminal) -> None:
        self._shown = shown
        self._began_s = time.monotonic()
        self.frames: list[Frame] = []

    def watch(self, seconds: float) -> None:
        """Record for a time."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self._shown.draw(min(left, FRAME_S))
            self._take()

    def watch_until(self, found: str, *, times: int = 1) -> None:
        """Record until a text is on the screen, or there so many times."""
        while self._shown.text.count(found) < times:
            self.watch(FRAME_S)

    def type(self, text: str) -> None:
        """Type at the speed of a person, then Enter."""
        for key in text:
            self._shown.type(key)
            self.watch(KEY_S)
        self._shown.type("\r")

    def _take(self) -> None:
        at_s = time.monotonic() - self._began_s
        lines = [_segments(self._shown, row) for row in range(self._shown.screen.lines)]
        if not self.frames:
            self.frames.append(Frame(0.0, lines))
        elif at_s - self.frames[-1].at_s >= FRAME_S and lines != self.frames[-1].lines:
            self.frames.append(Frame(at_s, lines))


def _segments(shown: Terminal, row: int) -> list[Segment]:
    """Convert a line of pyte's screen."""
    found = []
    for column in range(shown.screen.columns):
        char = shown.screen.buffer[row][column]
        style = Style(
            color=_colour(char.fg),
            bgcolor=_colour(char.bg),
            bold=char.bold,
            italic=char.italics,
            underline=char.underscore,
            reverse=char.reverse,
        )
        found.append(Segment(char.data, style))
    return found


def _colour(name: str) -> str | None:
    if name == "default":
        return None
    if len(name) == 6 and all(digit in "0123456789abcdef" for digit in name):
        return f"#{name}"
    return COLOURS.get(name) or name.replace("bright", "bright_")


@contextmanager
def recorded(arguments: Sequence[str], *, lines: int) -> Iterator[tuple[Terminal, Recording]]:
    """Run a command of uma-trio on a terminal."""
    with terminal([*UMA_TRIO, *arguments], columns=COLUMNS, lines=lines) as shown:
        yield shown, Recording(shown)


def demo(file: Path) -> None:
    """The demo draws its picture itself."""
    subprocess.run([*UMA_TRIO, "demo", "--no-live", "--picture", str(file)], check=True)


def metrics(file: Path) -> None:
    """``uma-trio metrics --watch`` while four clients count, and the demo begins on the same daemon."""
    with real_daemon() as daemon, ExitStack() as stack:
        socket = ("--socket", str(daemon.socket))
        watch = ["metrics", "--watch", "--interval", "0.25", *socket]
        shown, recording = stack.enter_context(recorded(watch, lines=24))
        loads = [["ask", "--max-tokens", "3900", "Count from 1 to 900.", *socket]] * 4 + [
            ["demo", "--no-live", *socket]
        ]
        recording.watch(0.5)
        for load in loads:
            started = subprocess.Popen([*UMA_TRIO, *load], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            stack.callback(started.wait)
            stack.callback(started.terminate)
            recording.watch(0.5)
        recording.watch(5.0)
        shown.type("q")
        shown.wait()
    file.write_text(svg(recording.frames, title="uma-trio metrics --watch", width=COLUMNS, hold_s=2.0))


def chat(file: Path) -> None:
    """A conversation."""
    with real_daemon() as daemon, recorded(["chat", "--socket", str(daemon.socket)], lines=22) as (shown, recording):
        recording.watch_until("/help")
        recording.watch(0.5)
        for question, ends in (
            ("Hello, my name is Ada.", "meet you."),
            ("What is the capital of France?", "Paris."),
            ("And of Italy?", "Rome."),
            ("Tell me a story about a fox named Ivo.", "Ivo the fox."),
            ("What is my name?", "is Ada."),
        ):
            recording.type(question)
            recording.watch_until(ends)
            recording.watch(0.8)
        shown.type("\x04")
        shown.wait()
    file.write_text(svg(recording.frames, title="uma-trio chat", width=COLUMNS, hold_s=4.0))


def dashboard(file: Path) -> None:
    """The dashboard while ten clients are served."""
    with real_daemon("--parallel", "16", "--ctx", "32768", "--http", "0") as daemon, opened_page() as page:
        url = daemon.http_url()
        page.goto(url)
        with load(url, 10):
            page.wait_for_timeout(6000)
            page.screenshot(path=file)


BEFORE: Final = [
    {"role": "user", "content": "How large is a circle?"},
    {
        "role": "assistant",
        "content": "$$A = \\pi r^2 \\qquad U = 2 \\pi r$$\n\n| radius | area | circumference |\n|-:|-:|-:|\n"
        "| 1 | $\\pi$ | $2\\pi$ |\n| 2 | $4\\pi$ | $4\\pi$ |\n",
    },
    {"role": "user", "content": "What is the capital of Peru?"},
]
"""A conversation that the page is to go on with; its first answer is more than the embedded model knows."""


def chat_page(file: Path, *, width: int = 900, height: int = 800, scheme: str = "light", runs: bool = False) -> None:
    """A conversation in the chat page, with a formula, a question that was edited, and a picture to be sent.

    Args:
        runs: a question is being answered by a model that hears, and a text is typed that is to be part of its answer.
    """
    size = {"width": width, "height": height}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        projector = projector_file(folder, "qwen2a") if runs else projector_file(folder)
        daemon = stack.enter_context(
            real_daemon("--ctx", "32768", "--http", "0", "--mmproj", str(projector), folder=folder)
        )
        body = {"session_id": "chat-circle", "messages": BEFORE, "history": "replace", "stream": False}
        httpx.post(f"{daemon.http_url()}/v1/generate", json=body, timeout=60).raise_for_status()
        page = stack.enter_context(opened_page(**size, color_scheme=scheme, reduced_motion="reduce"))
        page.goto(f"{daemon.http_url()}/chat#chat-circle")
        page.locator("article.user button:text('Edit')").last.click()
        page.fill(".edit textarea", "What is the capital of Spain?")
        page.press(".edit textarea", "Enter")
        page.wait_for_selector(".switcher")
        if runs:
            page.fill("#prompt", "Count from 1 to 900.")
            page.press("#prompt", "Enter")
            page.wait_for_selector("article:last-child .text:has-text('20, 21')")
            page.fill("#prompt", "and so on, to 900.")
        else:
            page.set_input_files("#files", ROOT / "docs" / "dashboard.png")
            page.wait_for_selector("#attached li")
            page.fill("#prompt", "What does this show?")
            page.wait_for_function("() => document.querySelector('#attached canvas').width !== 300")
        page.screenshot(path=file)


PICTURES: Final[dict[str, Callable[[Path], None]]] = {
    "demo.svg": demo,
    "metrics.svg": metrics,
    "chat.svg": chat,
    "dashboard.png": dashboard,
    "chat-page.png": chat_page,
    "chat-page-dark.png": partial(chat_page, scheme="dark"),
    "chat-page-phone.png": partial(chat_page, width=390, height=800, runs=True),
}
NAMES: Final = {name.partition(".")[0]: name for name in PICTURES}


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(list(NAMES)))
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=ROOT / "docs", help="Folder.")
def main(names: tuple[str, ...], out: Path) -> None:
    """Make the pictures of the README."""
    for name in names or NAMES:
        file = out / NAMES[name]
        PICTURES[file.name](file)
        click.echo(f"{file}: {file.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
