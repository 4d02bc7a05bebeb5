"""Where the daemon listens: the path of its socket, and the address of its HTTP gateway.

Server, clients and command line share these rules.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

SOCKET_VARIABLE: Final = "UMA_SOCKET"
FALLBACK_PATH: Final = "/tmp/uma.sock"

MAX_PATH_BYTES: Final = 103
"""``sun_path`` has 104 bytes on macOS and 108 on Linux, including the NUL at the end."""
GIVE_A_SHORTER_PATH: Final = "choose a shorter one with --socket"


def default_socket_path(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the path to use when no socket is given explicitly.

    The first of these that applies:

    1. ``$UMA_SOCKET``, if it is not empty;
    2. ``$XDG_RUNTIME_DIR/uma-trio/uma.sock``, if ``$XDG_RUNTIME_DIR`` is the absolute path of a folder;
    3. ``/tmp/uma.sock``.
    """
    if chosen := environment.get(SOCKET_VARIABLE):
        return Path(os.path.expanduser(chosen))
    runtime = environment.get("XDG_RUNTIME_DIR")
    if runtime and os.path.isabs(runtime) and os.path.isdir(runtime):
        return Path(runtime, "uma-trio", "uma.sock")
    return Path(FALLBACK_PATH)


def socket_path(given: str | os.PathLike[str] | None) -> Path:
    """Return the path that is ``given`` explicitly, or the default."""
    if given is None:
        return default_socket_path()
    return (given if isinstance(given, Path) else Path(given)).expanduser()


def too_long(path: Path) -> str | None:
    """Why no socket can be at ``path``; ``None`` if its length allows one.  ``GIVE_A_SHORTER_PATH`` is the remedy."""
    n_bytes = len(os.fsencode(path))
    if n_bytes <= MAX_PATH_BYTES:
        return None
    return f"the path of a socket has at most {MAX_PATH_BYTES} bytes, and {path} has {n_bytes}"


def lock_path(socket: Path) -> Path:
    """Return the path of the lock file.  A daemon locks it before it loads the model, and until it has ended."""
    return Path(f"{socket}.lock")


DEFAULT_HTTP_HOST: Final = "127.0.0.1"
MAX_PORT: Final = 65535


class InvalidAddress(ValueError):
    """An address for HTTP that is not of the form ``PORT`` or ``HOST:PORT``, or has no such port."""


def http_address(given: str) -> tuple[str, int]:
    """Host and port of ``PORT``, ``:PORT``, ``HOST:PORT`` or ``[IPV6]:PORT``; an empty host is ``127.0.0.1``.

    Raises:
        InvalidAddress: it has another form.
    """
    host, _, port = given.removeprefix("http://").rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise InvalidAddress(f"{given!r} is not [HOST:]PORT; an IPv6 address needs brackets, as in [::1]:8080")
    if not (port.isascii() and port.isdigit()):
        raise InvalidAddress(f"{given!r} is not [HOST:]PORT; 127.0.0.1:8080 is an example")
    if len(port) > 5 or int(port) > MAX_PORT:
        raise InvalidAddress(f"{given!r} has a port that is too large; {MAX_PORT} is the last one")
    return host or DEFAULT_HTTP_HOST, int(port)
