"""Describes the machine; every bench prints this before its figures."""

from __future__ import annotations

import datetime
import os
import platform
from pathlib import Path

import psutil
import trio

from llama_abi.errors import LibraryError
from llama_abi.locations import library_directory
from llama_abi.stamp import Stamp

KERNEL_FEATURES = ("amx_int8", "avx512_vnni", "avx512f", "avx2", "sve", "neon")
"""Instruction sets that select the matrix kernels of ggml, the most important first."""


def machine() -> list[str]:
    """Lines about processor, memory, system, versions, library, load and date."""
    memory_gib = psutil.virtual_memory().total / 2**30
    return [
        f"cpu       {_processor()}, {psutil.cpu_count(logical=False)} cores, {psutil.cpu_count()} threads, "
        f"{memory_gib:.0f} GiB",
        f"system    {_system()}, Python {platform.python_version()}, trio {trio.__version__}",
        f"llama.cpp {_library()}",
        f"load      {' '.join(f'{load:.2f}' for load in os.getloadavg())} before the start (1, 5, 15 minutes)",
        f"date      {datetime.date.today().isoformat()}",
    ]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = set(fields.get("flags", fields.get("Features", "")).split())
    known = [flag for flag in KERNEL_FEATURES if flag in flags]
    name = fields.get("model name", platform.machine())
    return f"{name} ({', '.join(known)})" if known else name


def _system() -> str:
    try:
        name = platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        name = platform.platform()
    return f"{name}, {platform.system()} {platform.release()}"


def _library() -> str:
    directory = library_directory()
    try:
        stamp = Stamp.read(directory)
    except LibraryError as error:
        return f"unknown: {error}"
    return f"{stamp.pin}, {stamp.backend} backend"
