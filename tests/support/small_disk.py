"""A disk of its own, which is soon full."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(folder: Path, mib: int = 1, options: str = "") -> Iterator[None]:
    """Mount one at ``folder``.  Skips the test where that is not allowed."""
    folder.mkdir(parents=True, exist_ok=True)
    words = ["mount", "-t", "tmpfs", "-o", f"size={mib}m{options}", "none", str(folder)]
    if os.geteuid() != 0 or subprocess.run(words, capture_output=True).returncode:
        pytest.skip("only root mounts a small disk")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> None:
    """Leave no room."""
    with open(folder / "filling", "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def make_read_only(folder: Path) -> None:
    """Make a small disk read-only, also for root."""
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True, capture_output=True)
