"""Small files that a person names: what is read, and what is replaced."""

from __future__ import annotations

import os
import resource
import stat
import threading
from pathlib import Path

import pytest

from uma_trio.files import MAX_TEXT_BYTES, read_text, replace_text


def test_a_regular_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    replace_text(path, "Größe\n")
    assert read_text(path) == read_text(path, pipes=True) == "Größe\n"
    assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0o066 & ~umask()


@pytest.mark.parametrize("pipes", [False, True])
def test_what_cannot_be_read(tmp_path: Path, pipes: bool) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b"a" * (MAX_TEXT_BYTES + 1))
    (tmp_path / "latin1").write_bytes(b"\xe9")
    for name, reason in (
        ("pipe", "nobody writes" if pipes else "not a regular file"),
        ("/dev/zero", "larger than 1 MiB" if pipes else "not a regular file"),
        ("large", "larger than 1 MiB"),
        (".", "Is a directory"),
        ("none", "No such file"),
    ):
        with pytest.raises(OSError, match=reason):
            read_text(tmp_path / name, pipes=pipes)
    with pytest.raises(UnicodeDecodeError):
        read_text(tmp_path / "latin1", pipes=pipes)


def test_a_pipe_is_read_to_its_end() -> None:
    reading, writing = os.pipe()
    text = "model:\n" + "# comment\n" * 20_000  # more than a pipe holds: the reader has to wait for the writer

    def write() -> None:
        with open(writing, "w") as file:
            file.write(text)

    writer = threading.Thread(target=write)
    writer.start()
    assert read_text(Path(f"/dev/fd/{reading}"), pipes=True) == text
    writer.join()
    os.close(reading)


def test_a_failed_replacement_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # as on a full disk
    try:
        with pytest.raises(OSError, match="large"):
            replace_text(path, "new")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_text() == "old"
    assert [*tmp_path.iterdir()] == [path]


def test_a_replacement_keeps_links_and_modes(tmp_path: Path) -> None:
    path, link = tmp_path / "a", tmp_path / "link"
    path.write_text("old")
    path.chmod(0o640)
    link.symlink_to("a")
    replace_text(link, "new")
    assert link.is_symlink()
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_only_regular_files_are_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/null")):
        with pytest.raises(OSError, match="not a regular file"):
            replace_text(path, "new")
    assert [each.name for each in tmp_path.iterdir()] == ["pipe"]


def umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
