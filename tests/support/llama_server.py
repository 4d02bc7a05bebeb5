"""llama-server, built from the same source, to compare with."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.real_daemon import ROOT

LLAMA_SERVER = ROOT / "build/peers/bin/llama-server"
START_S = 60.0


@contextlib.contextmanager
def llama_server(model: Path, *flags: str, log_file: Path) -> Iterator[str]:
    """The URL of a llama-server that is ready; the test is skipped if there is none."""
    if not LLAMA_SERVER.exists():
        pytest.skip(f"{LLAMA_SERVER} is missing: ./build_llama.sh --peers builds it")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [str(LLAMA_SERVER), "--model", str(model), "--port", str(port), "-t", "1", *flags]
    with log_file.open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_healthy(url, server)
        yield url
    finally:
        server.kill()
        server.wait()


def _wait_until_healthy(url: str, server: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + START_S
    while True:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/health").status_code == 200:
                return
        assert server.poll() is None, "llama-server has ended"
        assert time.monotonic() < until, "llama-server does not start"
        time.sleep(0.05)
