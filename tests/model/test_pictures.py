"""docs/pictures.py records the real commands."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.support.browser import find_chromium
from tests.support.documents import ROOT


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "texts"), [("chat", ["Paris.", "Rome.", "Your name is Ada."]), ("metrics", ["tokens/s"])]
)
def test_a_picture_is_a_recording(library, tmp_path, name, texts):
    done = subprocess.run(
        [sys.executable, ROOT / "docs" / "pictures.py", name, "--out", tmp_path],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    drawn = (tmp_path / f"{name}.svg").read_text()
    words = re.sub(r"<[^>]+>", "", drawn)
    assert "@keyframes" in drawn
    for text in texts:
        assert text in words


@pytest.mark.thorough
@pytest.mark.skipif(find_chromium() is None, reason="needs Chromium: apt-get install chromium")
@pytest.mark.parametrize("name", ["dashboard", "chat-page-phone"])
def test_the_picture_of_a_page_is_small(library, tmp_path, name):
    pytest.importorskip("playwright", reason="needs playwright: pip install playwright")
    command = [sys.executable, ROOT / "docs" / "pictures.py", name, "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    drawn = (tmp_path / f"{name}.png").read_bytes()
    assert drawn.startswith(b"\x89PNG")
    assert 20_000 < len(drawn) < 200_000
