"""The servers under test: how each is started, reached and stopped."""

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
from llama_http import LlamaServer
from pinning import Cores

from llama_abi.library import DIRECTORY_VARIABLE
from llama_abi.stamp import DEFAULT_DIRECTORY
from uma_trio.demo import load
from uma_trio.demo.temporary_daemon import temporary_daemon
from uma_trio.models.loaded import EMBEDDED

PEERS_VARIABLE = "LLAMA_PEERS_DIR"
DEFAULT_PEERS = Path(__file__).resolve().parent.parent / "build" / "peers" / "bin"

START_S = 300.0
"""Models of many GB take their time."""
POLL_S = 0.02
LOG_TAIL = 2000

Protocol = Literal["json", "cbor"]


class NoPeer(Exception):
    """A rival is not there, or did not come up; says what would help."""


@attrs.frozen(kw_only=True)
class Rig:
    """A server under test: how to reach it, which process it is, what to call it."""

    transport: load.Transport
    pid: int | None
    description: str


def sharing(rig: Rig) -> Rig:
    """The same server, asked to use what it has computed for prompts that began alike."""
    return attrs.evolve(rig, transport=attrs.evolve(rig.transport, cache_prompt=True))


@attrs.frozen(kw_only=True)
class Serving:
    """What every server in a comparison is told alike."""

    model: Path = EMBEDDED
    threads: int
    parallel: int
    """Sequences at a time."""
    ctx: int
    """Tokens of context, for all sequences together."""

    def __str__(self) -> str:
        size = self.model.stat().st_size / 2**20
        return (
            f"{self.model.name}, {size:.0f} MiB; {self.threads} compute threads, {self.parallel} sequences, "
            f"{self.ctx} tokens of context together"
        )


def room(words: int, tokens: int) -> int:
    """Tokens of context for a prompt of so many common words and its answer, whatever the tokenizer."""
    return -(-(4 * words + 16 + tokens) // 256) * 256


# -- uma-trio ------------------------------------------------------------------------------------


def uma_trio_flags(serving: Serving) -> list[str]:
    return [
        "--model", str(serving.model), "--threads", str(serving.threads),
        "--parallel", str(serving.parallel), "--ctx", str(serving.ctx),
    ]  # fmt: skip


@contextlib.asynccontextmanager
async def uma_trio_rig(flags: Sequence[str] = (), *, protocol: Protocol = "json") -> AsyncIterator[Rig]:
    """A daemon of our own for as long as this lasts.

    Raises:
        DaemonStartError: it did not come up.
    """
    async with temporary_daemon(flags) as own:
        yield await _rig(own.path, own.pid, " ".join(flags) or "no flags", protocol)


@contextlib.asynccontextmanager
async def running_rig(path: str, *, protocol: Protocol = "json") -> AsyncIterator[Rig]:
    """The daemon that serves at ``path``."""
    yield await _rig(path, peer_pid(path), "as it was started", protocol)


async def _rig(path: str | os.PathLike[str], pid: int | None, flags: str, protocol: Protocol) -> Rig:
    daemon = load.Daemon(path, protocol)
    model = (await daemon.snapshot())["model"]
    return Rig(transport=daemon, pid=pid, description=f"uma-trio serve ({flags}), model {model}, {protocol}")


def peer_pid(path: str) -> int | None:
    """The process that listens at ``path``, where the system tells."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except OSError:
            return None  # the client says it better
        size = struct.calcsize("3i")
        pid, _, _ = struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
        return int(pid)


# -- llama.cpp's own -----------------------------------------------------------------------------


def peers_option() -> Callable[[click.decorators.FC], click.decorators.FC]:
    """The option that names the folder of llama.cpp's programs."""
    return click.option(
        "--rival-bin", "peers", show_default=False, type=click.Path(file_okay=False, path_type=Path), envvar=PEERS_VARIABLE, default=DEFAULT_PEERS,
        help=f"Folder of llama-server and its like: ${PEERS_VARIABLE}, else build/peers/bin, which ./build_llama.sh --peers fills.",
    )  # fmt: skip


def peer(folder: Path, name: str) -> Path:
    """The program ``name``.

    Raises:
        NoPeer: it is not there.
    """
    program = folder / name
    if not os.access(program, os.X_OK):
        raise NoPeer(f"there is no {name} in {folder}: run ./build_llama.sh --peers, or say where with --rival-bin")
    return program


def same_library(folder: Path) -> bool:
    """Whether the programs in ``folder`` run on the very library that uma-trio runs on."""
    ours = Path(os.environ.get(DIRECTORY_VARIABLE) or DEFAULT_DIRECTORY)
    files = [path for path in ours.glob("lib*") if path.is_file()]
    return bool(files) and all(
        (folder / path.name).exists() and filecmp.cmp(path, folder / path.name, shallow=False) for path in files
    )


def llama_flags(serving: Serving) -> list[str]:
    threads = str(serving.threads)
    return ["-m", str(serving.model), "-t", threads, "-tb", threads, "-c", str(serving.ctx)]


@contextlib.asynccontextmanager
async def llama_server_rig(folder: Path, serving: Serving, flags: Sequence[str] = ()) -> AsyncIterator[Rig]:
    """llama-server with ``flags`` on a free port of this host, ready to be asked; stopped at the end.

    It keeps no prompts of earlier requests in memory, as uma-trio does not: every prompt is another one.

    Raises:
        NoPeer: it is not there, it ended, or it was not ready in time.
    """
    own = [*llama_flags(serving), "-np", str(serving.parallel), "--cache-ram", "0", *flags]
    command = [str(peer(folder, "llama-server")), *own, "--host", "127.0.0.1", "--port", "0"]
    with tempfile.TemporaryDirectory(prefix="llama-") as place:
        log = trio.Path(place, "log")
        with open(log, "wb") as sink:  # noqa: ASYNC230 - a new file in a folder of ours
            async with trio.open_nursery() as nursery:
                # A cancelled run_process sends SIGTERM, and SIGKILL after 5 s.
                process: trio.Process = await nursery.start(
                    partial(trio.run_process, command, check=False, stdout=sink, stderr=subprocess.STDOUT)
                )
                try:
                    server = await _ready(process, log)
                    yield Rig(transport=server, pid=process.pid, description=f"llama-server {' '.join(own)}")
                finally:
                    nursery.cancel_scope.cancel()


async def _ready(process: trio.Process, log: trio.Path) -> LlamaServer:
    """It chooses a free port itself, and says in its log which."""
    with trio.move_on_after(START_S):
        while process.returncode is None:
            found = re.search(rb"listening on http://([\d.]+):(\d+)", await log.read_bytes())
            if found:
                server = LlamaServer(found[1].decode(), int(found[2]))
                if await server.healthy():
                    return server
            await trio.sleep(POLL_S)
            process.poll()
    ended = process.returncode is not None
    said = (await log.read_text(errors="replace")).strip()
    raise NoPeer(
        f"llama-server {'ended at its start' if ended else f'was not ready after {START_S:g} s'}: "
        f"{said[-LOG_TAIL:] or 'it said nothing'}"
    )


async def run_peer(program: Path, arguments: Sequence[str], cores: Cores | None = None) -> str:
    """Run one of llama.cpp's programs to its end, on ``cores`` or wherever the system puts it.

    Returns:
        What it wrote to its standard output.

    Raises:
        NoPeer: it failed.
    """
    # Between fork and exec, so that also what it counts at its start are these cores.
    before = None if cores is None else partial(os.sched_setaffinity, 0, cores)
    done = await trio.run_process(
        [str(program), *arguments], check=False, capture_stdout=True, capture_stderr=True, preexec_fn=before
    )
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()
        raise NoPeer(f"{program.name} ended with {done.returncode}: {said[-LOG_TAIL:]}")
    return done.stdout.decode(errors="replace")
