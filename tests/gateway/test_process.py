"""The gateway process: it may die at any moment, clients may leave, and the daemon and its other clients go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from tests.gateway.conftest import Gateway
from tests.support.real_daemon import Canary, missing, real_daemon

LONG = {
    "messages": [{"role": "user", "content": "Tell me a story about a fox."}],
    "max_tokens": 4000,
    "ignore_eos": True,
}


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_its_request(gateway: Gateway, stream: bool) -> None:
    with gateway.http() as client:
        if stream:
            with client.stream("POST", "/v1/chat/completions", json={**LONG, "stream": True}) as answer:
                next(answer.iter_bytes())
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post("/v1/chat/completions", json=LONG, timeout=0.5)
    gateway.daemon.settled()


def test_a_gateway_that_is_killed_comes_back_and_clients_of_the_socket_do_not_notice() -> None:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    with real_daemon("--http", "0") as daemon:
        gateway = Gateway.of(daemon)
        with Canary(daemon), gateway.http() as client:
            for n in range(5):
                assert client.get("/healthz").json()["status"] == "ok"
                os.kill(daemon.metrics()["gateway"]["pid"], signal.SIGKILL)
                daemon.wait_until(lambda found, n=n: found["gateway"]["restarts_total"] == n + 1, "a new gateway")
                client.close()
                client = gateway.http()
        daemon.settled()


def test_the_gateway_ends_with_the_daemon_also_after_a_kill() -> None:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    with real_daemon("--http", "0") as daemon:
        Gateway.of(daemon)
        child = psutil.Process(daemon.metrics()["gateway"]["pid"])
        os.kill(daemon.pid, signal.SIGKILL)
        child.wait(30)


def test_an_address_in_use_is_refused_before_the_model_is_loaded(gateway: Gateway, tmp_path: Path) -> None:
    address = gateway.url.removeprefix("http://")
    command = [sys.executable, "-m", "uma_trio", "serve", "--socket", str(tmp_path / "s"), "--http", address]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == 1
    assert "address already in use; choose another --http" in found.stderr


@pytest.mark.parametrize("address", ["x", "1:2:3", "localhost:", "127.0.0.1:70000", "no.such.host.invalid:80"])
def test_a_wrong_address_is_refused(address: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "uma_trio", "serve", "--socket", str(tmp_path / "s"), "--http", address]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == 1
    assert "--http" in found.stderr
    assert "Traceback" not in found.stderr
