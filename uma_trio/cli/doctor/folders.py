"""Checks of the folders that the daemon writes: whether it can, and whether there is space."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import attrs

from uma_trio.cli.doctor.findings import Finding, Verdict
from uma_trio.config import MB
from uma_trio.files import state_folder

if TYPE_CHECKING:
    from uma_trio.config import Config

MARGIN_MB: Final = 16
"""Space for small files: a journal, a measurement, a snapshot."""


@attrs.frozen(kw_only=True)
class WrittenFolder:
    """A folder that the daemon writes."""

    name: str
    """The check's name in the report."""
    purpose: str
    path: Path
    setting: str
    """The flag or variable that chooses another folder."""
    without: str
    """What is missing if the folder cannot be written."""
    verdict: Verdict = "problem"
    """What the check says if the folder cannot be written."""
    limit_mb: int = 0
    """Most megabytes of files that grow."""
    limit_setting: str = ""


def check_runtime_folder() -> Iterator[Finding]:
    """Check the folder of the default socket."""
    from uma_trio.protocol.address import SOCKET_VARIABLE, default_socket_path

    runtime = os.environ.get("XDG_RUNTIME_DIR")
    where = f"the default socket is {default_socket_path()}"
    if os.environ.get(SOCKET_VARIABLE):
        yield Finding("folders", "ok", f"{where}, from {SOCKET_VARIABLE}")
    elif not runtime:
        fix = "log in through systemd, or set XDG_RUNTIME_DIR to a private folder"
        yield Finding("folders", "warning", f"XDG_RUNTIME_DIR is not set, {where}", fix)
    elif not os.path.isabs(runtime):
        message = f"XDG_RUNTIME_DIR is {runtime!r}, which is not an absolute path; {where}"
        yield Finding("folders", "warning", message, "set XDG_RUNTIME_DIR to an absolute path")
    elif not os.path.isdir(runtime):
        message = f"XDG_RUNTIME_DIR is {runtime}, which is not a folder; {where}"
        yield Finding("folders", "warning", message, f"mkdir -m 700 {runtime}")
    elif (status := os.stat(runtime)).st_uid != os.geteuid() or cannot_write(Path(runtime)):
        fix = "set XDG_RUNTIME_DIR to a folder that you own, or give --socket"
        message = f"XDG_RUNTIME_DIR is {runtime}, which you do not own or cannot write to"
        yield Finding("folders", "problem", message, fix)
    elif status.st_mode & 0o077:
        yield Finding("folders", "warning", f"other users have access to {runtime}; {where}", f"chmod 700 {runtime}")
    else:
        yield Finding("folders", "ok", where)
    for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        value = os.environ.get(name)
        if value and not os.path.isabs(value):
            message = f"{name} is {value!r}, which is not an absolute path"
            yield Finding("folders", "warning", message, f"set {name} to an absolute path")


def check_folders(settings: Config) -> Iterator[Finding]:
    """Check every folder that a daemon with these settings writes, except for the one of its socket."""
    from uma_trio.engine_link.tuning_cache import cost_folder

    sessions, operations = settings.sessions, settings.operations
    folders = [
        WrittenFolder(
            name="state",
            purpose="sessions and KV states",
            path=state_folder(settings.sessions.state_dir),
            setting="--state-dir",
            without="sessions end with the daemon",
            limit_mb=sessions.offload_max_mb if sessions.offload else 0,
            limit_setting="--offload-max-mb",
        ),
        WrittenFolder(
            name="cache",
            purpose="measured costs and layouts",
            path=cost_folder(),
            setting="XDG_CACHE_HOME",
            without="every start measures them again",
            verdict="warning",
        ),
    ]
    if operations.snapshot_dir is not None:
        folders.append(
            WrittenFolder(
                name="snapshots",
                purpose="metrics snapshots",
                path=operations.snapshot_dir,
                setting="--snapshot-dir",
                without="SIGUSR1 writes none",
            )
        )
    if operations.perf_log is not None:
        if (unusable := _unusable_perf_log(operations.perf_log)) is not None:
            yield unusable
        elif operations.perf_log.is_file() or not operations.perf_log.exists():  # not a pipe or a device
            folders.append(
                WrittenFolder(
                    name="perf log",
                    purpose=operations.perf_log.name,
                    path=operations.perf_log.parent,
                    setting="--perf-log",
                    without="there is no perf log",
                    limit_mb=operations.perf_log_mb,
                    limit_setting="--perf-log-mb",
                )
            )
    for folder in folders:
        yield check_folder(folder, must_exist=folder.name in ("snapshots", "perf log"))


def check_folder(folder: WrittenFolder, *, must_exist: bool = False) -> Finding:
    """Check one folder.

    Args:
        must_exist: the daemon does not create it.
    """
    name, path = folder.name, folder.path
    other = f"choose another folder with {folder.setting}"
    if must_exist and not path.exists():
        return Finding(name, folder.verdict, f"{path} does not exist: {folder.without}", f"mkdir -p {path}, or {other}")
    if reason := cannot_write(path):
        message = f"{folder.purpose} cannot be written to {path} ({reason}): {folder.without}"
        return Finding(name, folder.verdict, message, f"make it a folder that this user can write to, or {other}")
    free_mb = shutil.disk_usage(_existing(path)).free // MB
    grows_mb = max(0, folder.limit_mb - _used_mb(path))
    message = f"{folder.purpose} in {path}, {free_mb:,} MB free"
    if free_mb < MARGIN_MB:
        return Finding(name, folder.verdict, f"{message}: {folder.without}", f"free some space, or {other}")
    if free_mb < grows_mb + MARGIN_MB:
        message += f", but {folder.limit_setting[2:].replace('-', '_')} lets them take another {grows_mb:,} MB"
        fix = f"free some space, lower {folder.limit_setting}, or {other}"
        return Finding(name, "warning", message, fix)
    return Finding(name, "ok", message)


def cannot_write(folder: Path) -> str | None:
    """Why no file can be made in ``folder``, or in the nearest one above it that exists; ``None`` if one can.

    Makes a file without a name for a moment: permissions alone do not tell of a disk that is read-only or full.
    """
    nearest = _existing(folder)
    if not nearest.is_dir():
        return f"{nearest} is not a folder"
    try:
        with tempfile.TemporaryFile(dir=nearest) as file:
            file.write(b"x")
            file.flush()
    except OSError as error:
        return f"{nearest}: {error.strerror or error}" if nearest != folder else error.strerror or str(error)
    return None


def _existing(path: Path) -> Path:
    """``path``, or the nearest folder above it that this user can see."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if os.path.lexists(folder))


def _used_mb(folder: Path) -> int:
    n_bytes = 0
    for at, _, files in os.walk(folder):
        for file in files:
            try:
                n_bytes += os.lstat(os.path.join(at, file)).st_size
            except OSError:  # it was removed meanwhile
                continue
    return n_bytes // MB


def _unusable_perf_log(path: Path) -> Finding | None:
    """A perf log that exists must be a file of that kind."""
    from uma_trio.telemetry.perf_records import FIRST_BYTES, GZIP_MAGIC

    fix = "choose another file with --perf-log"
    if path.is_dir():
        return Finding("perf log", "problem", f"{path} is a folder", fix)
    if not path.is_file() or path.stat().st_size == 0:
        return None
    if not os.access(path, os.R_OK | os.W_OK):
        return Finding("perf log", "problem", f"{path} is not writable for this user", fix)
    expected = GZIP_MAGIC if path.suffix == ".gz" else FIRST_BYTES
    with path.open("rb") as file:
        if file.read(len(expected)) != expected:
            return Finding("perf log", "problem", f"{path} exists and is not a perf log", fix)
    return None
