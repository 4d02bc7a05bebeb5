"""Checks of the Python environment, the compute threads and the API keys of the HTTP gateway."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from uma_trio.cli.doctor.findings import Finding

if TYPE_CHECKING:
    from uma_trio.config import Config


def check_python() -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    yield Finding("python", "ok", f"Python {version} in {sys.prefix}")


def check_packages() -> Iterator[Finding]:
    from importlib import metadata

    try:
        wanted = [line for line in metadata.requires("uma-trio") or [] if "extra ==" not in line]
        ours = metadata.version("uma-trio")
    except metadata.PackageNotFoundError:
        yield Finding(
            "packages", "warning", "uma-trio is not installed; it runs from its source tree", "run ./build_llama.sh"
        )
        return
    wrong, n_found = [], 0
    for line in wanted:
        match = re.match(r"([\w.-]+)\s*(?:>=\s*([\d.]+))?", line)
        assert match is not None
        name, least = match[1], match[2]
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{name} is missing")
            continue
        n_found += 1
        if least is not None and _numbers(version) < _numbers(least):
            wrong.append(f"{name} is {version}, but at least {least} is required")
    if wrong:
        yield Finding(
            "packages",
            "problem",
            "; ".join(wrong),
            "run pip install --upgrade --find-links FOLDER 'uma-trio[llama]', where FOLDER has the wheels of uma-trio, "
            "or in a checkout ./build_llama.sh",
        )
    else:
        yield Finding("packages", "ok", f"uma-trio {ours}, and all {n_found} packages that it needs")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def check_threads(settings: Config) -> Iterator[Finding]:
    from uma_trio.processes.machine import default_threads, physical_cores

    cores, threads = physical_cores(), settings.model.threads or default_threads()
    message = f"{threads} compute thread{'s' * (threads > 1)} on {cores} physical core{'s' * (cores > 1)}"
    if threads >= cores > 1:
        fix = f"leave one core to the event loop: --threads {cores - 1}"
        yield Finding("threads", "warning", f"{message}: any other work on this machine delays tokens", fix)
    else:
        yield Finding("threads", "ok", message)


def check_keys(settings: Config) -> Iterator[Finding]:
    """Check the file of tenants, if there is one.  A file without keys refuses everybody."""
    from uma_trio.gateway.key_file import KeyFileError, default_path, read

    path = settings.http.keys or default_path()
    if settings.http.keys is None and not path.exists():
        return
    try:
        tenants = read(path).by_name.values()
    except KeyFileError as error:
        yield Finding("keys", "problem", error.reason, error.remedy)
        return
    n_keys = sum(len(tenant.keys) for tenant in tenants)
    if n_keys:
        holders = sum(bool(tenant.keys) for tenant in tenants)
        yield Finding("keys", "ok", f"API keys in {path}: {n_keys}, of tenants: {holders}; HTTP needs one of them")
        return
    fix = "uma-trio keys create NAME; to serve without keys, delete the file and restart the daemon"
    yield Finding("keys", "warning", f"{path} has no API key, so HTTP refuses everybody", fix)
