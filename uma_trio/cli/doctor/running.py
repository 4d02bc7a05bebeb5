"""Checks of the socket, and of a daemon that runs there."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from uma_trio.cli.doctor.findings import Finding
from uma_trio.cli.doctor.folders import cannot_write
from uma_trio.engine.devices import size

if TYPE_CHECKING:
    from uma_trio.config import Config

SOCKET_S: Final = 2.0
"""How long a daemon may take to answer."""
SLOW_MS: Final = 250.0
"""An answer that takes longer than this is a warning."""


def check_socket(settings: Config) -> Iterator[Finding]:
    """Check the socket's path, and the daemon that answers there, if one does."""
    import stat

    from uma_trio.protocol.address import MAX_PATH_BYTES, default_socket_path

    path = settings.listen.socket or default_socket_path()
    other = "choose another path with --socket"
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        yield Finding(
            "socket", "problem", f"{path} is longer than {MAX_PATH_BYTES} bytes", "choose a shorter path with --socket"
        )
        return
    try:
        found = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        yield _free(path, other)
    except OSError as error:
        yield Finding("socket", "problem", f"{path}: {error.strerror}", other)
    else:
        if not stat.S_ISSOCK(found.st_mode):
            yield Finding("socket", "problem", f"{path} exists and is not a socket", f"remove it, or {other}")
        elif found.st_uid != os.geteuid():
            yield Finding("socket", "problem", f"{path} belongs to another user", other)
        elif stat.S_IMODE(found.st_mode) & 0o077:
            yield Finding(
                "socket",
                "warning",
                f"other users can connect to {path}",
                "restart the daemon, which makes its socket private",
            )
        else:
            yield from _daemon(path, settings)


def _free(path: Path, other: str) -> Finding:
    """Check whether a daemon could create the socket, which does not exist."""
    from uma_trio.connect import Loading, explain

    if reason := cannot_write(path.parent):
        return Finding("socket", "problem", f"{path} cannot be created ({reason})", other)
    missing = explain(path, FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)))
    if isinstance(missing, Loading):
        return Finding("socket", "ok", str(missing))
    return Finding("socket", "ok", f"no daemon is running; uma-trio serve would create {path}")


def _daemon(path: Path, settings: Config) -> Iterator[Finding]:
    """Check whether a daemon answers on the existing socket, how fast, and whether its engine was restarted."""
    import socket

    from uma_trio.errors import ProtocolError
    from uma_trio.protocol.codec import ClientCodec
    from uma_trio.protocol.messages import Failure, Metrics
    from uma_trio.protocol.payload import Encoding

    protocol = settings.listen.protocol
    codec = ClientCodec(Encoding.CBOR if protocol == "cbor" else Encoding.JSON)
    restart = "stop it (SIGTERM, then SIGKILL) and start uma-trio serve again"
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(SOCKET_S)
        began = time.monotonic()
        try:
            sock.connect(os.fspath(path))
        except ConnectionRefusedError:
            yield Finding("socket", "ok", f"{path} was left behind by a daemon that ended; uma-trio serve replaces it")
            return
        except OSError as error:
            yield Finding("socket", "problem", f"{path} does not accept connections: {error}", restart)
            return
        if protocol == "newline":
            yield Finding("socket", "ok", f"a daemon is running on {path}")
            return
        try:
            sock.sendall(codec.encode({"type": "metrics"}))
            while (event := codec.next_event()) is None:
                left = began + SOCKET_S - time.monotonic()
                if left <= 0:
                    raise TimeoutError
                sock.settimeout(left)
                data = sock.recv(1 << 16)
                codec.receive_data(data)
                if not data:
                    event = codec.next_event()
                    break
        except TimeoutError:
            yield Finding("socket", "problem", f"the server on {path} does not answer within {SOCKET_S:g} s", restart)
            return
        except (OSError, ProtocolError) as error:
            yield Finding(
                "socket",
                "problem",
                f"the server on {path} is not a uma-trio daemon: {error}",
                "choose another path with --socket",
            )
            return
    ms = 1e3 * (time.monotonic() - began)
    if not isinstance(event, Metrics | Failure):
        yield Finding(
            "socket", "problem", f"the server on {path} is not a uma-trio daemon", "choose another path with --socket"
        )
        return
    if isinstance(event, Failure):
        yield Finding("socket", "warning", f"the daemon on {path} says {event.code}: {event.message}", "see its log")
        return
    message = f"a daemon serves {event.snapshot.get('model')} on {path} and answers in {ms:.1f} ms"
    if ms > SLOW_MS:
        yield Finding("socket", "warning", message, "the machine is busy with other work; see threads above")
    else:
        yield Finding("socket", "ok", message)
    if "engine" in event.snapshot:
        yield _engine(event.snapshot["engine"])


def _engine(engine: dict[str, Any]) -> Finding:
    """Report the engine from a metrics snapshot.  An engine without a process id runs in a thread of the daemon."""
    if engine.get("pid") is None:
        return Finding("engine", "ok", "it runs in a thread of the daemon")
    restarts = engine["restarts_total"]
    message = f"it runs in process {engine['pid']}"
    if "rss_bytes" in engine:
        message += f" with {size(round(engine['rss_bytes']))} of memory"
    if restarts == 0:
        return Finding("engine", "ok", f"{message} and was never restarted")
    times = "once" if restarts == 1 else f"{restarts} times"
    fix = "read the reasons in the daemon's log; --engine-hang-timeout-s is the limit for a step that hangs"
    return Finding("engine", "warning", f"{message} and was restarted {times} after it died or hung", fix)
