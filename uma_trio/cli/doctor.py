"""``uma-trio doctor``: check the installation, and suggest fixes."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import attrs
import click

from uma_trio.cli import probe
from uma_trio.cli.probe import available_memory, size

if TYPE_CHECKING:
    from uma_trio.config import Config

Verdict = Literal["ok", "warning", "problem"]

SOCKET_S: Final = 2.0
"""How long a daemon may take to answer."""
SLOW_MS: Final = 250.0
"""An answer that takes longer than this is a warning."""
ANSWER: Final = "Paris"
"""Part of the embedded model's answer to ``probe.QUESTION``."""


@attrs.frozen
class Finding:
    """One line of the report: the result of a check."""

    name: str
    verdict: Verdict
    message: str
    fix: str | None = None


@click.command("doctor", short_help="Check the installation and suggest fixes.")
@click.option("--model", type=click.Path(), help="GGUF file to check. If not given, the one that serve would use.")
@click.option("--socket", type=click.Path(), help="Socket to check. If not given, the one that serve would use.")
@click.option("--llama-dir", type=click.Path(), help="Folder of the built libllama.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option("--probe", "probing", hidden=True, is_flag=True)
def command(model: str | None, socket: str | None, llama_dir: str | None, as_json: bool, probing: bool) -> None:
    """Check the installation and suggest fixes.

    Prints a line for each check, with a verdict (ok, warning or problem) and, if something is wrong, a fix.  The checks
    cover Python and its packages, folders, compute threads, the library and its devices, the model, memory, the layout
    of the KV cache, an answer of the model, and the socket.

    Code that could hang or crash runs in a separate process with a time limit.  Exit codes: 0 no problem (there may
    be warnings), 1 at least one problem.
    """
    flags = {"model": model, "socket": socket, "llama_dir": llama_dir}
    if probing:
        probe.probe(_settings(flags))
        return
    findings = []
    for finding in _examine(flags):
        findings.append(finding)
        if not as_json:
            _show(finding)
    worst = next((v for v in ("problem", "warning") if any(found.verdict == v for found in findings)), "ok")
    if as_json:
        click.echo(json.dumps({"verdict": worst, "checks": [attrs.asdict(found) for found in findings]}, indent=2))
    sys.exit(1 if worst == "problem" else 0)


def _show(finding: Finding) -> None:
    colour = {"ok": "green", "warning": "yellow", "problem": "red"}[finding.verdict]
    click.echo(f"{click.style(f'{finding.verdict:<8}', fg=colour)} {finding.name:<9} {finding.message}")
    if finding.fix:
        click.echo(f"{'':<19}fix: {finding.fix}")


def _settings(flags: dict[str, Any]) -> Config:
    from uma_trio import config

    return config.load(None, os.environ, flags)


def _examine(flags: dict[str, Any]) -> Iterator[Finding]:
    """Run all checks.  A check that raises an exception is a finding too."""
    from uma_trio.config import ConfigError

    yield from _guarded("python", _python)
    yield from _guarded("packages", _packages)
    try:
        settings = _settings(flags)
    except ConfigError as error:
        yield Finding("config", "problem", str(error), "correct it; uma-trio serve --print-config prints all settings")
        return
    yield from _guarded("folders", _folders)
    yield from _guarded("stamp", lambda: _stamp(settings))
    yield from _guarded("threads", lambda: _threads(settings))
    yield from _guarded("library", lambda: _model_and_library(settings, flags))
    yield from _guarded("socket", lambda: _socket(settings))


def _guarded(name: str, check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from check()
    except Exception as error:  # noqa: BLE001  (a defect in one check must not hide the others)
        yield Finding(
            name, "problem", f"the check failed: {type(error).__name__}: {error}", "please report this as a bug"
        )


# -- environment ---------------------------------------------------------------------------------------


def _python() -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    yield Finding("python", "ok", f"Python {version} in {sys.prefix}")


def _packages() -> Iterator[Finding]:
    import re
    from importlib import metadata

    try:
        wanted = [line for line in metadata.requires("uma-trio") or [] if "extra ==" not in line]
        ours = metadata.version("uma-trio")
    except metadata.PackageNotFoundError:
        yield Finding(
            "packages", "warning", "uma-trio is not installed; it runs from its source tree", "run ./build_llama.sh"
        )
        return
    wrong, found = [], []
    for line in wanted:
        match = re.match(r"([\w.-]+)\s*(?:>=\s*([\d.]+))?", line)
        assert match is not None
        name, least = match[1], match[2]
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{name} is missing")
            continue
        found.append(f"{name} {version}")
        if least is not None and _numbers(version) < _numbers(least):
            wrong.append(f"{name} is {version}, but at least {least} is required")
    if wrong:
        yield Finding(
            "packages", "problem", "; ".join(wrong), "run ./build_llama.sh, or pip install --upgrade uma-trio"
        )
    else:
        yield Finding("packages", "ok", f"uma-trio {ours} with {', '.join(found)}")


def _numbers(version: str) -> tuple[int, ...]:
    import re

    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def _folders() -> Iterator[Finding]:
    from uma_trio.protocol.address import default_socket_path

    runtime = os.environ.get("XDG_RUNTIME_DIR")
    where = f"the default socket is {default_socket_path()}"
    if not runtime:
        fix = "log in through systemd, or set XDG_RUNTIME_DIR to a private folder"
        yield Finding("folders", "warning", f"XDG_RUNTIME_DIR is not set, {where}", fix)
    elif not os.path.isdir(runtime):
        yield Finding(
            "folders",
            "warning",
            f"XDG_RUNTIME_DIR is {runtime}, which is not a folder; {where}",
            f"mkdir -m 700 {runtime}",
        )
    elif (status := os.stat(runtime)).st_uid != os.geteuid() or not os.access(runtime, os.W_OK | os.X_OK):
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
            yield Finding(
                "folders",
                "warning",
                f"{name} is {value!r}, which is not an absolute path",
                f"set {name} to an absolute path",
            )


def _threads(settings: Config) -> Iterator[Finding]:
    from uma_trio.engine.cores import default_threads, physical_cores

    cores, threads = physical_cores(), settings.model.threads or default_threads()
    message = f"{threads} compute thread{'s' * (threads > 1)} on {cores} physical core{'s' * (cores > 1)}"
    if threads >= cores > 1:
        fix = f"leave one core to the event loop: --threads {cores - 1}"
        yield Finding("threads", "warning", f"{message}: any other work on this machine delays tokens", fix)
    else:
        yield Finding("threads", "ok", message)


# -- the library and the model --------------------------------------------------------------------


def _stamp(settings: Config) -> Iterator[Finding]:
    from uma_trio.engine.inspect import LibraryProblem, library_directory, read_stamp

    directory = library_directory(settings.model.llama_dir)
    try:
        stamp = read_stamp(directory)
    except LibraryProblem as error:
        message, _, fix = str(error).rpartition(": ")
        yield Finding("stamp", "problem", message or str(error), fix or "run ./build_llama.sh")
    else:
        yield Finding("stamp", "ok", f"{stamp.pin}, built for {stamp.backend}, in {directory}")


def _model_and_library(settings: Config, flags: dict[str, Any]) -> Iterator[Finding]:
    """Check what ``probe`` reports from a separate process."""
    from uma_trio.models.loaded import EMBEDDED

    path = settings.model.model or EMBEDDED
    stages, ending = probe.run(flags)
    library = stages.get("library")
    if library is None:
        yield Finding("library", "problem", f"loading the library {ending}", "run ./build_llama.sh --clean")
        return
    if "problem" in library:
        message, _, fix = library["problem"].rpartition(": ")
        yield Finding("library", "problem", message or library["problem"], fix or "run ./build_llama.sh")
        return
    yield Finding("library", "ok", f"it loads and supports up to {library['max_sequences']} sequences")
    yield from _devices(library)
    yield from _card(path, EMBEDDED)
    yield from _model(path, stages.get("model"), ending)
    if "model" in stages and "problem" not in stages["model"]:
        yield _memory(stages["model"])
        yield _layout(stages["model"])
        yield _answer(path == EMBEDDED, stages.get("answer"), ending)


def _devices(library: dict[str, Any]) -> Iterator[Finding]:
    devices = [
        f"{device['name']} ({device['description']}"
        + (
            f", {size(device['memory_free'])} of {size(device['memory_total'])} free)"
            if device["memory_total"]
            else ")"
        )
        for device in library["devices"]
    ]
    if not devices:
        yield Finding(
            "devices", "problem", "the library finds no device to compute with", "run ./build_llama.sh --clean"
        )
    else:
        yield Finding("devices", "ok", "; ".join(devices))
    yield Finding("backend", "ok", library["system_info"].strip() or "the library does not describe it")


def _card(path: Path, embedded: Path) -> Iterator[Finding]:
    """Compare the embedded model with the checksum in its card."""
    import hashlib
    import re

    if path != embedded:
        return
    if not embedded.is_file():
        yield Finding("embedded", "problem", f"{embedded} is missing", "reinstall uma-trio, or serve another --model")
        return
    found = hashlib.sha256(embedded.read_bytes()).hexdigest()
    cards = [card for card in embedded.parent.iterdir() if card.suffix in (".json", ".md")]
    known = {digest for card in cards for digest in re.findall(r"\b[0-9a-f]{64}\b", card.read_text("utf-8"))}
    if known and found not in known:
        message = f"the checksum of {embedded} differs from the one in its card"
        yield Finding("embedded", "problem", message, "reinstall uma-trio: the file is damaged or was replaced")
    else:
        against = "as in its card" if known else "there is no card to compare it with"
        yield Finding("embedded", "ok", f"{size(embedded.stat().st_size)}, sha256 {found[:12]}, {against}")


def _model(path: Path, found: dict[str, Any] | None, ending: str) -> Iterator[Finding]:
    fix = "serve another file with --model, or reinstall uma-trio for the embedded model"
    if found is None:
        yield Finding("model", "problem", f"loading {path} {ending}", fix)
    elif "problem" in found:
        yield Finding("model", "problem", found["problem"], fix)
    else:
        about = f"{found['description']}, {found['n_params'] / 1e6:,.1f} M parameters"
        yield Finding("model", "ok", f"{path.name}: {about}, training context {found['n_ctx_train']} tokens")


def _memory(found: dict[str, Any]) -> Finding:
    available = available_memory()
    message = f"{size(found['peak_bytes'])} for the process with the model and a KV cache of {found['n_ctx']:,} tokens"
    if available is None:
        return Finding("memory", "ok", message)
    message += f"; {size(available)} are available"
    if found["peak_bytes"] > available:
        return Finding(
            "memory", "problem", message, "serve a smaller model, lower --ctx, or set --type-k and --type-v to q8_0"
        )
    if found["peak_bytes"] > 0.8 * available:
        return Finding("memory", "warning", message, "lower --ctx, or set --type-k and --type-v to q8_0")
    return Finding("memory", "ok", message)


LAYOUT_WHY: Final = {
    "only one": "fixed by the settings",
    "default": "the default, not measured",
    "measured": "measured now, for the next starts too",
    "measured before": "measured by an earlier start",
    "no time": "the default, because measuring takes longer than layout_trial_s",
    "no room": "the default, because the faster layout does not fit into memory",
}


def _layout(found: dict[str, Any]) -> Finding:
    """Report the layout of the KV cache, which ``uma_trio.engine.layout`` chooses."""
    shown = [f"{name}: {ticks}" for name, ticks in found["layouts"].items()]
    return Finding("layout", "ok", "; ".join([f"{found['layout']}, {LAYOUT_WHY[found['layout_why']]}", *shown]))


def _answer(embedded: bool, found: dict[str, Any] | None, ending: str) -> Finding:
    if found is None:
        return Finding("answer", "problem", f"asking the model {ending}", "run ./build_llama.sh --clean")
    if "problem" in found:
        return Finding("answer", "problem", found["problem"], "run ./build_llama.sh --clean")
    message = f"{found['text'].strip()!r} in {found['ms']:.0f} ms"
    if embedded and ANSWER not in found["text"]:
        fix = "run ./build_llama.sh --clean: the library computes wrong results"
        return Finding("answer", "problem", f"the answer to {probe.QUESTION!r} was {message}", fix)
    return Finding("answer", "ok", message)


# -- the socket -------------------------------------------------------------------------------------


def _socket(settings: Config) -> Iterator[Finding]:
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
    folder = next(folder for folder in path.absolute().parents if folder.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        return Finding("socket", "problem", f"{path} cannot be created: {folder} is not writable", other)
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
