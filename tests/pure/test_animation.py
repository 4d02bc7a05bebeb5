"""The animated SVG shows each frame at its time, and the last one where nothing moves."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from rich.text import Text

from tests.support.cases import all_cases
from uma_trio.demo.animation import Frame, lines_of, svg

SVG = "{http://www.w3.org/2000/svg}"


def frames(*texts: str, every_s: float = 1.0) -> list[Frame]:
    return [Frame(n * every_s, lines_of(Text(text), 40)) for n, text in enumerate(texts)]


def shown(picture: str, share: float | None) -> str:
    """The lines that a viewer shows after a share of the animation; without animations if ``share`` is None."""
    root = ElementTree.fromstring(picture)
    style = root.findtext(f"{SVG}style") or ""
    rules = {name: _steps(body) for name, body in re.findall(r"@keyframes (\w+)\{((?:[^{}]+\{[^}]*\})*)\}", style)}
    screen = root.find(f"{SVG}g")
    assert screen is not None
    lines: dict[int, str] = {}
    for element in screen:
        if element.tag == f"{SVG}text":
            texts = [element]
        else:
            texts = element.findall(f"{SVG}text")
            name = (element.get("style") or "").removeprefix("animation-name:")
            hidden = "h" in (element.get("class") or "").split()
            if share is not None:
                hidden = _hidden(rules[name], 100 * share, hidden)
            if hidden:
                continue
        for text in texts:
            row = int(text.get("y") or 0)
            assert row not in lines or text.get("x") != "0.0", "two lines are shown in one place"
            lines[row] = f"{lines[row]}  {_text(text)}" if row in lines else _text(text)
    return "\n".join(line for _, line in sorted(lines.items()))


def _text(element: ElementTree.Element) -> str:
    return "".join(element.itertext())


def _steps(body: str) -> list[tuple[float, bool]]:
    found = re.findall(r"([\d.]+%|to)\{visibility:(\w+)\}", body)
    assert found
    return [(100.0 if at == "to" else float(at[:-1]), value == "hidden") for at, value in found]


def _hidden(steps: list[tuple[float, bool]], percent: float, hidden: bool) -> bool:
    for at, value in steps:
        if at <= percent:
            hidden = value
    return hidden


def test_each_frame_is_shown_at_its_time() -> None:
    texts = ["one", "one\ntwo  far", "one\n\nthree", "four\ntwo\nthree", "one"]
    picture = svg(frames(*texts), title="t", width=40, hold_s=1.0)
    for n, text in enumerate(texts):
        expected = "\n".join(line for line in text.splitlines() if line)
        assert shown(picture, (n + 0.5) / len(texts)) == expected


def test_where_nothing_moves_it_shows_the_last_frame() -> None:
    assert shown(svg(frames("one", "two", "three\nfour"), title="t", width=40), None) == "three\nfour"


def test_one_frame_has_no_animation() -> None:
    picture = svg(frames("one\ntwo"), title="t", width=40)
    assert "keyframes" not in picture
    assert shown(picture, 0.5) == shown(picture, None) == "one\ntwo"


def test_a_line_that_stays_is_there_once() -> None:
    picture = svg(frames(*(f"stays\n{n}" for n in range(20))), title="t", width=40)
    assert picture.count("stays") == 1


def test_letters_of_markup_and_colours() -> None:
    line = Text("<a & b>", style="bold red") + Text(" dim", style="dim") + Text(" back", style="reverse")
    root = ElementTree.fromstring(svg([Frame(0.0, lines_of(line, 40))], title="<t>", width=40))
    style = root.findtext(f"{SVG}style") or ""
    assert root.findtext(f"{SVG}title") == "<t>"
    assert "font-weight:bold" in style
    assert len(root.findall(f".//{SVG}rect")) == 2, "the window, and behind the reversed word"
    assert "<a & b>" in "".join(root.itertext())


@all_cases("text", ["grüße 日本 x", "a  b", "  indented", "x" * 40])
def test_words_stand_at_their_columns(text: str) -> None:
    root = ElementTree.fromstring(svg(frames(text), title="t", width=40))
    for element in root.findall(f"{SVG}g/{SVG}text"):
        word = _text(element)
        assert float(element.get("x") or 0) == pytest.approx(_columns(text[: text.index(word)]) * 8.4, abs=0.1)
        assert float(element.get("textLength") or 0) == pytest.approx(_columns(word) * 8.4, abs=0.1)


def _columns(text: str) -> int:
    return sum(2 if ord(letter) > 0x2E80 else 1 for letter in text)
