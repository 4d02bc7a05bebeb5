"""docs/pictures.py records the real commands."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.support.documents import ROOT


@pytest.mark.slow
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
