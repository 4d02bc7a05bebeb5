"""Files of the store of modules: replaced whole; machine code runs as it is, so nobody else may have written it."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path
from typing import Final

DIGEST_BYTES: Final = 32
"""Behind the code stands its SHA-256: code that the disk has damaged must not run."""


def replace_compiled(path: Path, compiled: bytes) -> None:
    """Write machine code, or leave the file as it is.  Raises ``OSError``."""
    replace_file(path, compiled, hashlib.sha256(compiled).digest())


def read_compiled(path: Path) -> bytes:
    """Machine code.

    Raises:
        OSError: it cannot be read.
        ValueError: it is damaged, or another user can write to its folder.
    """
    found = path.parent.stat()
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ValueError(f"others can write to {path.parent}")
    data = path.read_bytes()
    compiled, digest = data[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
    if hashlib.sha256(compiled).digest() != digest:
        raise ValueError("the machine code is damaged")
    return compiled


def replace_file(path: Path, *parts: bytes) -> None:
    """Write a file, or leave it as it is.  Raises ``OSError``."""
    temporary = path.with_name(f".{path.name}-{os.getpid()}.tmp")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
            file.writelines(parts)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
