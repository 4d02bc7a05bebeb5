"""Lines that are the path of a file, as a terminal pastes it."""

from __future__ import annotations

import shlex
from pathlib import Path

from uma_trio.cli.content import dropped_file


def test_a_line_that_is_the_path_of_a_picture_or_sound(tmp_path: Path) -> None:
    cat, song = tmp_path / "a cat's.PNG", tmp_path / "song.flac"
    for each in (cat, song):
        each.write_bytes(b"")
    assert dropped_file(shlex.quote(str(cat))) == ("image", str(cat))
    assert dropped_file(str(cat).replace(" ", "\\ ").replace("'", "\\'")) == ("image", str(cat))
    assert dropped_file(cat.as_uri().replace("'", "%27")) == ("image", str(cat))
    assert dropped_file(f" {song} ") == ("audio", str(song))


def test_all_other_lines_are_messages(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("text")
    song = tmp_path / "song.mp3"
    song.write_bytes(b"")
    others = ("", "hello", "it's", "/image", f"/image {song}", f"What is {song}", str(tmp_path / "none.png"))
    for line in (*others, str(tmp_path / "text.txt"), "~nobody/x.png", "x" * 5000 + ".png", "a\0b.png"):
        assert dropped_file(line) is None
