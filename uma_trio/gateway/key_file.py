"""The file of tenants: read by the gateway when it changes, rewritten by ``uma-trio keys``."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import platformdirs

from uma_trio.config import ConfigError, read_yaml
from uma_trio.errors import ErrorWithRemedy
from uma_trio.files import replace_text
from uma_trio.gateway.tenants import Tenant, Tenants, TenantsError, parse, to_plain

log = logging.getLogger("uma_trio.gateway")

HEADER: Final = "# Tenants of the HTTP gateway.  uma-trio keys --help explains them, and rewrites this file, without your comments.\n"


class KeyFileError(ErrorWithRemedy):
    """The file of tenants cannot be used."""


def default_path() -> Path:
    """Return the path of the file that counts if the setting ``http_keys`` names none."""
    return Path(platformdirs.user_config_dir("uma-trio")) / "keys.yaml"


def read(path: Path) -> Tenants:
    """Read the file.

    Raises:
        KeyFileError: it cannot be read, is not valid, or others could have written it.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise KeyFileError(
            f"cannot read {path}: {error.strerror}", f"make a first key: uma-trio keys create NAME --file {path}"
        ) from None
    if not stat.S_ISREG(status.st_mode):
        raise KeyFileError(f"cannot read {path}: it is not a regular file", "choose another file with --http-keys")
    if status.st_uid not in (os.geteuid(), 0):
        raise KeyFileError(f"{path} belongs to another user, who could add keys", f"chown it to user {os.geteuid()}")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise KeyFileError(f"{path} can be written by other users, who could add keys", f"chmod 600 {path}")
    try:
        return parse(read_yaml(path, "check the file"))
    except ConfigError as error:
        raise KeyFileError(str(error)) from None
    except TenantsError as error:
        raise KeyFileError(f"{path}: {error}") from None


@contextlib.contextmanager
def editing(path: Path) -> Iterator[dict[str, Tenant]]:
    """Yield the tenants of the file, by name, and write back what the block makes of them.

    Another process that edits the file waits until the block ends.  If the block raises, the file stays as it is.

    Raises:
        KeyFileError: the file cannot be read, is not valid, or cannot be written.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise KeyFileError(f"cannot write {path}: {error.strerror}", "choose another file with --file") from None
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        tenants = dict(read(path).by_name) if path.exists() else {}
        yield tenants
        _write(path, tenants)
    finally:
        os.close(folder)


def _write(path: Path, tenants: Mapping[str, Tenant]) -> None:
    import yaml

    text = HEADER + yaml.safe_dump(to_plain(tenants), sort_keys=False, width=120)
    try:
        replace_text(path, text, new_mode=0o600)
    except OSError as error:
        raise KeyFileError(f"cannot write {path}: {error.strerror}", "choose another file with --file") from None


class CurrentTenants:
    """The tenants of the file as it is now.

    A file that becomes unusable while the gateway runs leaves the tenants as they were, and the log says why: nobody gets
    in who had no key, and nobody is shut out by a typing error.  An unusable file that is new lets nobody in.

    Args:
        path: the file; ``None``: the one at ``default_path()``, as soon as it exists.

    Raises:
        KeyFileError: the file cannot be used.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path or default_path()
        self._tenants: Tenants | None = None
        self._signature = self._look()
        if path is not None or self._signature is not None:
            self._tenants = read(self._path)

    def now(self) -> Tenants | None:
        """Return the tenants, ``None`` as long as nobody has made a key.  Costs one ``stat`` if nothing has changed."""
        if self._look() != self._signature:
            self.read_again()
        return self._tenants

    def read_again(self) -> None:
        """Read the file now, whether it has changed or not."""
        self._signature = self._look()
        if self._signature is None and self._tenants is None:
            log.info("there are no tenants: %s does not exist", self._path)
            return
        try:
            self._tenants = read(self._path)
        except KeyFileError as error:
            self._tenants = self._tenants or Tenants({})
            log.error("the tenants stay as they were: %s", error)
        else:
            log.info("read %d tenants from %s", len(self._tenants.by_name), self._path)

    def _look(self) -> tuple[int, ...] | None:
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_size
