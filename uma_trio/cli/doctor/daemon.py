"""Checks of the socket, and of a daemon that runs there."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from uma_trio.cli.doctor.findings import Finding
from uma_trio.cli.doctor.folders import WrittenFolder, cannot_write, check_folder
from uma_trio.engine_link.devices import size
from uma_trio.files import state_folder

if TYPE_CHECKING:
    from uma_trio.config import Config

SOCKET_S: Final = 2.0
"""How long a daemon may take to answer."""
SLOW_MS: Final = 250.0
"""An answer that takes longer than this is a warning."""
OTHER_PATH: Final = "choose another path with --socket"


def check_socket(settings: Config) -> Iterator[Finding]:
    """Check the socket's path, and the daemon that answers there, if one does."""
    from uma_trio.protocol.address import GIVE_A_SHORTER_PATH, socket_path, too_long

    path = socket_path(settings.listen.socket)
    if reason := too_long(path):
        yield Finding("socket", "problem", reason, GIVE_A_SHORTER_PATH)
        return
    try:
        status = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        if reason := cannot_write(path.parent):
            yield Finding("socket", "problem", f"{path} cannot be created ({reason})", OTHER_PATH)
            return
    except OSError as error:
        yield Finding("socket", "problem", f"{path}: {error.strerror}", OTHER_PATH)
        return
    else:
        if (wrong := _unusable(path, status)) is not None:
            yield wrong
            return
    yield from _daemon(path, settings)


def _unusable(path: Path, status: os.stat_result) -> Finding | None:
    """What is wrong with the file at ``path``; ``None`` for a socket that this user's daemon can have made."""
    if not stat.S_ISSOCK(status.st_mode):
        return Finding("socket", "problem", f"{path} exists and is not a socket", f"remove it, or {OTHER_PATH}")
    if status.st_uid != os.geteuid():
        return Finding("socket", "problem", f"{path} belongs to another user", OTHER_PATH)
    if stat.S_IMODE(status.st_mode) & 0o077:
        fix = "restart the daemon, which makes its socket private"
        return Finding("socket", "warning", f"other users can connect to {path}", fix)
    return None


def _daemon(path: Path, settings: Config) -> Iterator[Finding]:
    """Check whether a daemon answers at ``path``, how fast, and whether its engine was restarted."""
    from uma_trio.connect.connector import connect_blocking
    from uma_trio.connect.errors import BrokenProtocol, NoDaemon
    from uma_trio.connect.query import query

    restart = "stop it (SIGTERM, then SIGKILL) and start uma-trio serve again"
    began = time.monotonic()
    try:
        if settings.listen.protocol in ("newline", "cbor"):  # a query is framed JSON
            connect_blocking(path).close()
            yield Finding("socket", "ok", f"a daemon is running on {path}")
            return
        [answer] = query(path, {"type": "metrics"}, timeout_s=SOCKET_S)
    except NoDaemon as error:
        if error.may_appear:  # uma-trio serve would start
            yield Finding("socket", "ok", str(error))
        else:
            yield Finding("socket", "problem", error.reason, restart)
        return
    except TimeoutError:
        yield Finding("socket", "problem", f"the server on {path} does not answer within {SOCKET_S:g} s", restart)
        return
    except BrokenProtocol as error:
        yield Finding("socket", "problem", f"the server on {path} is not a uma-trio daemon: {error}", OTHER_PATH)
        return
    ms = 1e3 * (time.monotonic() - began)
    if answer.get("event") == "error":
        message = f"the daemon on {path} says {answer.get('code')}: {answer.get('message')}"
        yield Finding("socket", "warning", message, "see its log")
        return
    if answer.get("event") != "metrics":
        yield Finding("socket", "problem", f"the server on {path} is not a uma-trio daemon", OTHER_PATH)
        return
    message = f"a daemon serves {answer.get('model')} on {path} and answers in {ms:.1f} ms"
    if ms > SLOW_MS:
        yield Finding("socket", "warning", message, "the machine is busy with other work; see threads above")
    else:
        yield Finding("socket", "ok", message)
    if "state_dir" in answer:
        yield from _state_folder(Path(answer["state_dir"]), settings)
    yield from _served(path)
    if answer.get("gateway"):
        yield _gateway(answer["gateway"])
    if answer.get("controllers"):
        yield _controllers(answer["controllers"])
    if "engine" in answer:
        models = answer.get("models") or {}
        yield _engine(answer["engine"], f"{answer.get('model')}: it" if len(models) > 1 else "it")
        for name, other in models.items():
            if "engine" in (other.get("metrics") or {}):
                yield _engine(other["metrics"]["engine"], f"{name}: it")


def _state_folder(folder: Path, settings: Config) -> Iterator[Finding]:
    """Check the folder of the running daemon, if its own flags have named another one than those of this command."""
    if folder != state_folder(settings.sessions.state_dir).absolute():
        purpose = "sessions and KV states of the running daemon"
        without = "its sessions end with it"
        yield check_folder(
            WrittenFolder(name="state", purpose=purpose, path=folder, setting="--state-dir", without=without)
        )


def _served(path: Path) -> Iterator[Finding]:
    """Report what the running daemon gives a request, which its own flags decide and not those of this command."""
    from uma_trio.connect.errors import BrokenProtocol, NoDaemon
    from uma_trio.connect.query import query

    try:
        [answer] = query(path, {"type": "models"}, timeout_s=SOCKET_S)
    except (BrokenProtocol, NoDaemon, TimeoutError) as error:
        yield Finding("served", "warning", f"the daemon does not say what it serves: {error}", "see its log")
        return
    for model in answer.get("models", ()):
        message = (
            f"{model['name']} with {model['context_per_request']} tokens of context for a request of the running daemon"
        )
        yield Finding("served", "ok", f"{message}, {model['parallel']} at a time")


def _gateway(gateway: dict[str, Any]) -> Finding:
    """Report the HTTP gateway from a metrics snapshot."""
    restarts = gateway["restarts_total"]
    if gateway["pid"] is None:
        return Finding("gateway", "warning", "HTTP is not served: its process starts again", "read the daemon's log")
    message = f"HTTP is served by process {gateway['pid']}"
    if not restarts:
        return Finding("gateway", "ok", message)
    times = "once" if restarts == 1 else f"{restarts} times"
    return Finding(
        "gateway", "warning", f"{message}, which was restarted {times}", "read the reasons in the daemon's log"
    )


def _controllers(controllers: dict[str, Any]) -> Finding:
    """Report the runtime of controllers from a metrics snapshot."""
    restarts = controllers["restarts_total"]
    running = controllers["pid"] is not None
    message = f"they run in process {controllers['pid']}" if running else "no request has needed them yet"
    if not restarts:
        return Finding("controllers", "ok", message)
    message = message if running else "they do not run"
    times = "once" if restarts == 1 else f"{restarts} times"
    fix = "read the reasons in the daemon's log"
    return Finding("controllers", "warning", f"{message}; their runtime has ended {times}", fix)


def _engine(engine: dict[str, Any], it: str) -> Finding:
    """Report the engine ``it`` from a metrics snapshot.  Without a process id it runs in a thread of the daemon."""
    if engine.get("pid") is None:
        return Finding("engine", "ok", f"{it} runs in a thread of the daemon")
    restarts = engine["restarts_total"]
    message = f"{it} runs in process {engine['pid']}"
    if "rss_bytes" in engine:
        message += f" with {size(round(engine['rss_bytes']))} of memory"
    if restarts == 0:
        return Finding("engine", "ok", f"{message} and was never restarted")
    times = "once" if restarts == 1 else f"{restarts} times"
    fix = "read the reasons in the daemon's log; --engine-hang-timeout-s is the limit for a step that hangs"
    return Finding("engine", "warning", f"{message} and was restarted {times} after it died or hung", fix)
