"""Starts, connects to and stops the servers under test."""

from __future__ import annotations

import contextlib
import filecmp
import os
import re
import socket
import struct
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import attrs
import click
import trio
from gateway_http import Gateway
from llama_http import LlamaServer
from pinning import Cores

from llama_abi.locations import library_directory
from uma_trio.demo import load
from uma_trio.demo.temporary_daemon import temporary_daemon
from uma_trio.models.packaged import EMBEDDED

PEERS_VARIABLE = "LLAMA_PEERS_DIR"
DEFAULT_PEERS = Path(__file__).resolve().parent.parent / "build" / "peers" / "bin"

START_S = 300.0
"""Limit for a start; models of many GB load slowly."""
RUNS_UNTIL_PRINTED = 3
"""llama-batched-bench writes its results in a thread that may not have begun when the process ends."""
POLL_S = 0.02
LOG_TAIL = 2000

Protocol = Literal["json", "cbor", "http"]
"""How uma-trio is asked: over its socket in one of two encodings, or over HTTP."""


class RivalError(Exception):
    """A program of llama.cpp is missing, failed or did not start.  The message has a remedy."""


@attrs.frozen(kw_only=True)
class Rig:
    """A running server under test."""

    transport: load.Transport
    pid: int | None
    description: str


def with_prefix_reuse(rig: Rig) -> Rig:
    """Return the same server with requests that allow prefix reuse."""
    return attrs.evolve(rig, transport=attrs.evolve(rig.transport, cache_prompt=True))


def without_speculation(rig: Rig) -> Rig:
    """Return the same server with requests that forbid draft tokens, whose gain depends on the text."""
    if isinstance(rig.transport, LlamaServer):  # it has none without a flag
        return rig
    return attrs.evolve(rig, transport=attrs.evolve(rig.transport, speculate=False))


@attrs.frozen(kw_only=True)
class ServerSettings:
    """Settings that all servers of a comparison have in common."""

    model: Path = EMBEDDED
    threads: int
    parallel: int
    """Sequences at the same time."""
    ctx: int
    """Tokens of context of all sequences together."""

    def __str__(self) -> str:
        size = self.model.stat().st_size / 2**20
        return (
            f"{self.model.name}, {size:.0f} MiB; {self.threads} compute threads, {self.parallel} sequences, "
            f"{self.ctx} tokens of context in all"
        )


def room(words: int, tokens: int) -> int:
    """Tokens of context that a prompt of ``words`` common words and its answer need with any tokenizer."""
    return -(-(4 * words + 16 + tokens) // 256) * 256


# -- uma-trio ------------------------------------------------------------------------------------


def uma_trio_flags(serving: ServerSettings) -> list[str]:
    return [
        "--model", str(serving.model), "--threads", str(serving.threads),
        "--parallel", str(serving.parallel), "--ctx", str(serving.ctx),
    ]  # fmt: skip


@contextlib.asynccontextmanager
async def uma_trio_rig(flags: Sequence[str] = (), *, protocol: Protocol = "json") -> AsyncIterator[Rig]:
    """Run a daemon until the context ends.

    Raises:
        DaemonStartError: the daemon did not start.
    """
    port = free_port() if protocol == "http" else None
    http = [] if port is None else ["--http", str(port)]
    async with temporary_daemon([*flags, *http]) as daemon:
        yield await _rig(daemon.path, daemon.pid, " ".join(flags) or "no flags", protocol, port)


@contextlib.asynccontextmanager
async def running_rig(path: str, *, protocol: Protocol = "json") -> AsyncIterator[Rig]:
    """Use the daemon that listens at ``path``."""
    yield await _rig(path, peer_pid(path), "flags unknown", protocol)


def free_port() -> int:
    """A TCP port of this host that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def _rig(
    path: str | os.PathLike[str], pid: int | None, flags: str, protocol: Protocol, port: int | None = None
) -> Rig:
    daemon = load.Daemon(path) if protocol == "http" else load.Daemon(path, protocol)
    model = (await daemon.snapshot())["model"]
    transport: load.Transport = daemon if port is None else Gateway("127.0.0.1", port, daemon)
    return Rig(transport=transport, pid=pid, description=f"uma-trio serve ({flags}), model {model}, {protocol}")


def peer_pid(path: str) -> int | None:
    """Process id of the program that listens at ``path``; ``None`` if the system does not report it."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except OSError:
            return None  # the client reports it
        size = struct.calcsize("3i")
        pid, _, _ = struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
        return int(pid)


# -- programs of llama.cpp -----------------------------------------------------------------------------


def peers_option() -> Callable[[click.decorators.FC], click.decorators.FC]:
    """The option for the folder of llama.cpp's programs."""
    return click.option(
        "--rival-bin", "peers", show_default=False, type=click.Path(file_okay=False, path_type=Path), envvar=PEERS_VARIABLE, default=DEFAULT_PEERS,
        help=f"Folder of llama-server and llama-batched-bench.  [default: ${PEERS_VARIABLE}, or build/peers/bin, which ./build_llama.sh --peers fills]",
    )  # fmt: skip


def peer(folder: Path, name: str) -> Path:
    """Return the path of the program ``name``.

    Raises:
        RivalError: there is no such program.
    """
    program = folder / name
    if not os.access(program, os.X_OK):
        raise RivalError(
            f"there is no {name} in {folder}: run ./build_llama.sh --peers, or give its folder with --rival-bin"
        )
    return program


def same_library(folder: Path) -> bool:
    """Whether the programs in ``folder`` use the same library files as uma-trio."""
    ours = library_directory()
    files = [path for path in ours.glob("lib*") if path.is_file()]
    return bool(files) and all(
        (folder / path.name).exists() and filecmp.cmp(path, folder / path.name, shallow=False) for path in files
    )


def llama_flags(serving: ServerSettings) -> list[str]:
    threads = str(serving.threads)
    return ["-m", str(serving.model), "-t", threads, "-tb", threads, "-c", str(serving.ctx)]


@contextlib.asynccontextmanager
async def llama_server_rig(folder: Path, serving: ServerSettings, flags: Sequence[str] = ()) -> AsyncIterator[Rig]:
    """Run llama-server with ``flags`` on a free port of this host until the context ends.

    Its prompt cache in host memory is off, since no prompt comes twice.

    Raises:
        RivalError: it is missing, ended, or was not ready within ``START_S``.
    """
    arguments = [*llama_flags(serving), "-np", str(serving.parallel), "--cache-ram", "0", *flags]
    command = [str(peer(folder, "llama-server")), *arguments, "--host", "127.0.0.1", "--port", "0"]
    with tempfile.TemporaryDirectory(prefix="llama-") as place:
        log = trio.Path(place, "log")
        with open(log, "wb") as sink:  # noqa: ASYNC230 - a new file in a private folder
            async with trio.open_nursery() as nursery:
                # A cancelled run_process sends SIGTERM, and SIGKILL after 5 s.
                process: trio.Process = await nursery.start(
                    partial(trio.run_process, command, check=False, stdout=sink, stderr=subprocess.STDOUT)
                )
                try:
                    server = await _ready(process, log)
                    yield Rig(transport=server, pid=process.pid, description=f"llama-server {' '.join(arguments)}")
                finally:
                    nursery.cancel_scope.cancel()


async def _ready(process: trio.Process, log: trio.Path) -> LlamaServer:
    """Wait until llama-server accepts requests.  It chooses a free port, which its log names."""
    with trio.move_on_after(START_S):
        while process.returncode is None:
            address = re.search(rb"listening on http://([\d.]+):(\d+)", await log.read_bytes())
            if address:
                server = LlamaServer(address[1].decode(), int(address[2]))
                if await server.healthy():
                    return server
            await trio.sleep(POLL_S)
            process.poll()
    ended = process.returncode is not None
    output = (await log.read_text(errors="replace")).strip()
    raise RivalError(
        f"llama-server {'ended at its start' if ended else f'was not ready after {START_S:g} s'}: "
        f"{output[-LOG_TAIL:] or 'it printed nothing'}"
    )


async def run_peer(program: Path, arguments: Sequence[str], cores: Cores | None = None) -> str:
    """Run a program of llama.cpp to its end, on ``cores`` if given.

    Returns:
        Its standard output.

    Raises:
        RivalError: it failed.
    """
    # pinned between fork and exec, so that the program counts these cores only
    before = None if cores is None else partial(os.sched_setaffinity, 0, cores)
    for _ in range(RUNS_UNTIL_PRINTED):
        done = await trio.run_process(
            [str(program), *arguments], check=False, capture_stdout=True, capture_stderr=True, preexec_fn=before
        )
        if done.returncode:
            output = done.stderr.decode(errors="replace").strip()
            raise RivalError(f"{program.name} ended with exit code {done.returncode}: {output[-LOG_TAIL:]}")
        if done.stdout:
            break
    return done.stdout.decode(errors="replace")
