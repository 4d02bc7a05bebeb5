"""The gateway process: it may die at any moment, clients may leave, and the daemon and its other clients go on."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.gateway.conftest import Gateway, Raw
from tests.support.commands import run_process
from tests.support.forked import WITH_STANDBY
from tests.support.profile import amount, sampled, thorough
from tests.support.real_daemon import LONG_CTX, Canary, missing, real_daemon
from uma_trio import config
from uma_trio.daemon.gateway_process import HttpAddressError, listening
from uma_trio.gateway.application import NO_KEYS

LONG = {
    "messages": [{"role": "user", "content": "Tell me a story about a fox."}],
    "max_tokens": 4000,
    "ignore_eos": True,
}

KILLS = amount(quick=3, thorough=100)
"""How often the gateway is killed."""


@pytest.fixture(scope="module")
def frail() -> Iterator[Gateway]:
    """A gateway that the tests of this module stop and starve; each leaves one that serves."""
    if (reason := missing()) is not None:
        pytest.skip(reason)
    with real_daemon(*LONG_CTX, "--http", "0", environment=WITH_STANDBY) as daemon:
        yield Gateway.of(daemon)


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


@pytest.mark.timeout(3600)
def test_a_gateway_that_is_killed_comes_back_and_clients_of_the_socket_do_not_notice() -> None:
    """Under load.  A client that connects while there is no gateway waits for the next one, and is not refused."""
    if (reason := missing()) is not None:
        pytest.skip(reason)
    ended = threading.Event()
    broken = [0]

    def load(url: str) -> None:
        while not ended.is_set():
            with contextlib.suppress(httpx.TransportError), httpx.Client(base_url=url, timeout=60) as client:
                client.post("/v1/chat/completions", json={**LONG, "max_tokens": 50}).raise_for_status()
                continue
            broken[0] += 1

    served_s: list[float] = []
    cpu_s: list[float] = []
    with real_daemon(*LONG_CTX, "--http", "0", "--parallel", "8") as daemon:
        gateway = Gateway.of(daemon)
        threads = [threading.Thread(target=load, args=(gateway.url,)) for _ in range(4)]
        with Canary(daemon) as canary:
            for thread in threads:
                thread.start()
            for n in range(KILLS):
                with gateway.http() as client:
                    assert client.get("/healthz").json()["status"] == "ok"
                before = daemon.metrics()["gateway"]["pid"]
                os.kill(before, signal.SIGKILL)
                began = time.monotonic()
                with gateway.http() as client:
                    client.get("/healthz").raise_for_status()
                served_s.append(time.monotonic() - began)
                found = daemon.wait_until(
                    lambda found, n=n: found["gateway"]["restarts_total"] == n + 1, "a new gateway"
                )
                cpu_s.append(found["gateway"]["cpu_s"])
            ended.set()
            for thread in threads:
                thread.join(60)
        daemon.settled()
    served_s.sort()
    print(
        f"{KILLS} kills: HTTP served after {statistics.median(served_s):.2f} s (median), {served_s[KILLS * 9 // 10]:.2f} s "
        f"(p90), {served_s[-1]:.2f} s at most; CPU time of a start {statistics.median(cpu_s):.2f} s; load average "
        f"{os.getloadavg()[1]:.1f}; {broken[0]} HTTP requests broke off; {canary.rounds} rounds of the canary"
    )


def test_a_gateway_that_is_stopped_is_replaced(frail: Gateway) -> None:
    daemon = frail.daemon
    with Canary(daemon):
        with frail.http() as client:
            client.get("/healthz").raise_for_status()
        os.kill(daemon.metrics()["gateway"]["pid"], signal.SIGSTOP)
        with frail.http() as client:  # its connection is in the backlog, which the next gateway serves
            client.get("/healthz", timeout=60).raise_for_status()
    assert any(
        "was stopped by a signal" in each["reason"] for each in daemon.logged("the gateway died and is started again")
    )


@pytest.mark.parametrize("number", sampled([signal.SIGKILL, signal.SIGSTOP], 2))
def test_the_standby_takes_over(frail: Gateway, number: signal.Signals) -> None:
    daemon = frail.daemon
    standby = daemon.standby()
    os.kill(daemon.metrics()["gateway"]["pid"], number)
    with frail.http() as client:
        client.get("/healthz", timeout=60).raise_for_status()
    assert daemon.metrics()["gateway"]["pid"] == standby.pid
    assert daemon.standby() != standby


@pytest.mark.parametrize("number", sampled([signal.SIGKILL, signal.SIGSTOP], 2))
def test_a_gateway_and_its_standby_that_end_together_are_replaced(frail: Gateway, number: signal.Signals) -> None:
    daemon = frail.daemon
    pids = [daemon.standby().pid, daemon.metrics()["gateway"]["pid"]]
    for pid in pids:
        os.kill(pid, number)
    with frail.http() as client:
        client.get("/healthz", timeout=60).raise_for_status()
    assert daemon.metrics()["gateway"]["pid"] not in pids


def test_a_gateway_without_free_file_descriptors_recovers(frail: Gateway) -> None:
    """While clients use all descriptors, others wait or get an error; nothing breaks, and it serves when they have left."""
    gateway, daemon = frail, frail.daemon
    restarts = daemon.wait_until(lambda found: found["gateway"]["pid"], "a gateway")["gateway"]["restarts_total"]
    with contextlib.ExitStack() as stack:
        process = psutil.Process(daemon.metrics()["gateway"]["pid"])
        with gateway.http() as client:
            client.get("/healthz").raise_for_status()
        n_fds = process.num_fds()
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (n_fds + 40, 4096))
        with Canary(daemon):
            for _ in range(100):
                stack.enter_context(Raw(gateway)).send(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n")
            daemon.wait_until(lambda _: process.num_fds() >= n_fds + 35, "the descriptors are in use")
            stack.close()
            with gateway.http() as client:
                assert client.post("/v1/chat/completions", json={**LONG, "max_tokens": 3}).status_code == 200
        assert process.is_running()
        assert daemon.metrics()["gateway"]["restarts_total"] == restarts
        daemon.wait_until(lambda _: process.num_fds() <= n_fds + 2, "the descriptors are free")
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (4096, 4096))


def test_requests_for_which_no_descriptor_is_left_get_503(frail: Gateway) -> None:
    gateway, daemon = frail, frail.daemon
    daemon.wait_until(lambda found: found["gateway"]["pid"], "a gateway")
    with contextlib.ExitStack() as stack:
        process = psutil.Process(daemon.metrics()["gateway"]["pid"])
        with gateway.http() as client:
            client.get("/healthz").raise_for_status()
            before = process.num_fds()
            raws = [stack.enter_context(Raw(gateway)) for _ in range(20)]
            body = json.dumps({**LONG, "max_tokens": 3}).encode()
            for raw in raws:  # they are accepted, and need a connection to the daemon now
                raw.send(b"POST /v1/generate HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n")
            client.get("/healthz").raise_for_status()
            daemon.wait_until(lambda _: process.num_fds() >= before + 20, "they are accepted")
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (process.num_fds() + 1, 4096))
            for raw in raws:
                raw.send(b"content-length: %d\r\n\r\n%s" % (len(body), body))
            # one that is refused before its body is read may be reset, and then its answer is lost
            answers = [answer for answer in [raw.rest() for raw in raws] if answer]
            assert answers
            assert {answer.split()[1] for answer in answers} <= {b"200", b"503"}
            assert all(b"retry-after" in answer.lower() for answer in answers if answer.split()[1] == b"503")
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (4096, 4096))
            assert client.post("/v1/generate", json={**LONG, "max_tokens": 3}).status_code == 200


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("module", "reason", "n_starts"),
    sampled(
        [
            ("import nothing_of_this_name", "No module named 'nothing_of_this_name'", 1),
            thorough("1 / 0", "ZeroDivisionError: division by zero", 1),
            ("import os; os.kill(os.getpid(), 11)", "SIGSEGV", 3),
        ],
        2,
    ),
)
def test_a_gateway_that_cannot_start_is_one_sentence_and_the_socket_is_served(
    tmp_path: Path, module: str, reason: str, n_starts: int
) -> None:
    if (reason_to_skip := missing()) is not None:
        pytest.skip(reason_to_skip)
    (tmp_path / "uvicorn.py").write_text(module)
    with real_daemon("--http", "0", environment={"PYTHONPATH": str(tmp_path)}) as daemon:
        daemon.logged("HTTP is not served, because the gateway cannot start")  # the last of them
        said = [line for line in daemon.log_lines() if "gateway" in line["event"]]
        assert len(said) == n_starts
        assert reason in said[-1]["reason"]
        assert daemon.ask(prompt="Hello", max_tokens=2).reason == "length"
        found = daemon.metrics()["gateway"]
        assert (found["pid"], found["restarts_total"]) == (None, n_starts - 1)


def test_the_gateway_ends_with_the_daemon_also_after_a_kill() -> None:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    with real_daemon(*LONG_CTX, "--http", "0") as daemon:
        Gateway.of(daemon)
        daemon.logged(NO_KEYS)
        child = psutil.Process(daemon.metrics()["gateway"]["pid"])
        os.kill(daemon.pid, signal.SIGKILL)
        child.wait(60)


def test_an_address_in_use_is_refused_before_the_model_is_loaded(gateway: Gateway, tmp_path: Path) -> None:
    address = gateway.url.removeprefix("http://")
    found = run_process("serve", "--socket", tmp_path / "s", "--http", address)
    assert found.returncode == 1
    assert "address already in use; choose another --http" in found.stderr


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("x", "is not"),
        ("1:2:3", "needs brackets"),
        ("localhost:", "is not"),
        ("80000", "too large; 65535 is the last one"),
        ("127.0.0.1:" + "9" * 5000, "too large"),
        ("no.such.host.invalid:80", "not known"),
    ],
)
def test_a_wrong_address_is_refused(address: str, reason: str) -> None:
    settings = config.load(None, {}, {"http": address})
    with pytest.raises(HttpAddressError, match=f"--http .*{reason}"), listening(settings):
        pass
