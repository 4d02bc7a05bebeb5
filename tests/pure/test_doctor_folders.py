"""``uma-trio doctor`` about the folders that the daemon writes."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest

from tests.support.serving import settings
from uma_trio.cli.doctor import folders
from uma_trio.cli.doctor.findings import Finding
from uma_trio.cli.doctor.folders import WrittenFolder, cannot_write, check_folder, check_folders, check_runtime_folder
from uma_trio.telemetry.perf_records import FIRST_BYTES

GB = 10**9


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    free(monkeypatch, 100 * GB)
    return tmp_path


def free(monkeypatch: pytest.MonkeyPatch, n_bytes: int) -> None:
    usage = shutil.disk_usage("/")._replace(free=n_bytes)
    monkeypatch.setattr(folders.shutil, "disk_usage", lambda path: usage)


def find(**values: Any) -> dict[str, Finding]:
    return {found.name: found for found in check_folders(settings(**values))}


def test_folders_that_do_not_exist_yet_are_fine_and_stay_so(home: Path) -> None:
    found = find()
    assert {name: each.verdict for name, each in found.items()} == {"state": "ok", "cache": "ok"}
    assert found["state"].message == f"sessions and KV states in {home}/state/uma-trio, 100,000 MB free"
    assert list(home.iterdir()) == []


def test_folders_that_cannot_be_written(home: Path) -> None:
    (home / "state").touch()
    (home / "cache").touch()
    found = find()
    assert {name: each.verdict for name, each in found.items()} == {"state": "problem", "cache": "warning"}
    assert "sessions end with the daemon" in found["state"].message
    assert f"{home}/state is not a folder" in found["state"].message
    assert "choose another folder with --state-dir" in (found["state"].fix or "")
    assert "every start measures them again" in found["cache"].message
    assert "choose another folder with XDG_CACHE_HOME" in (found["cache"].fix or "")


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_permissions_alone_do_not_make_a_folder_writable() -> None:
    """As on a disk that is mounted read-only; root may do anything in /proc by its permissions."""
    assert cannot_write(Path("/proc/uma-trio/costs")) is not None


def test_the_folder_that_exists_is_tried(home: Path) -> None:
    assert cannot_write(home) is None
    assert cannot_write(home / "a" / "b") is None
    assert list(home.iterdir()) == []


def test_space_for_what_may_grow(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 3 * GB)
    found = find(offload_max_mb=4000)["state"]
    assert found.verdict == "warning"
    assert "3,000 MB free, but offload_max_mb lets them take another 4,000 MB" in found.message
    assert "lower --offload-max-mb" in (found.fix or "")
    assert find(offload_max_mb=2000)["state"].verdict == "ok"
    assert find(offload=False)["state"].verdict == "ok"
    states = home / "state" / "uma-trio" / "model" / "states"
    states.mkdir(parents=True)
    with (states / "s").open("wb") as file:
        file.truncate(2 * GB)
    assert find(offload_max_mb=4000)["state"].verdict == "ok", "what is there already needs no more space"


def test_a_full_disk(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 1000)
    found = find(offload=False)
    assert (found["state"].verdict, found["cache"].verdict) == ("problem", "warning")
    assert (found["state"].fix or "").startswith("free some space, or ")


def test_a_perf_log(home: Path) -> None:
    def verdict(path: Path) -> tuple[str, str]:
        found = find(perf_log=str(path))["perf log"]
        return found.verdict, found.message

    assert verdict(home / "new.jsonl")[0] == "ok"
    (home / "old.jsonl").write_bytes(FIRST_BYTES + b"}\n")
    assert verdict(home / "old.jsonl")[0] == "ok"
    (home / "notes.txt").write_text("notes")
    assert verdict(home / "notes.txt") == ("problem", f"{home}/notes.txt exists and is not a perf log")
    assert verdict(home) == ("problem", f"{home} is a folder")
    assert verdict(home / "none" / "new.jsonl") == ("problem", f"{home}/none does not exist: there is no perf log")
    assert "perf log" not in find(perf_log="/dev/null"), "a device needs no folder"


def test_snapshots_need_their_folder(home: Path) -> None:
    assert find(snapshot_dir=str(home))["snapshots"].verdict == "ok"
    found = find(snapshot_dir=str(home / "none"))["snapshots"]
    assert found.verdict == "problem"
    assert (found.fix or "").startswith(f"mkdir -p {home}/none")


def test_what_is_missing_decides_the_verdict(home: Path) -> None:
    folder = WrittenFolder(name="x", purpose="things", path=home / "f" / "g", setting="--x", without="nothing works")
    (home / "f").touch()
    assert check_folder(folder).verdict == "problem"
    assert check_folder(attrs.evolve(folder, verdict="warning")).verdict == "warning"


def test_a_socket_of_the_environment_needs_no_runtime_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("UMA_SOCKET", "/run/uma-trio/uma.sock")
    (found,) = [finding for finding in check_runtime_folder() if finding.name == "folders"]
    assert (found.verdict, found.message) == ("ok", "the default socket is /run/uma-trio/uma.sock, from UMA_SOCKET")
