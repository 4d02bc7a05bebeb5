"""A disk that is full, for the gateway: quotas are counted in memory, and written when there is room again."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from tests.gateway.conftest import Gateway
from tests.support.commands import invoke
from tests.support.real_daemon import Canary, missing, real_daemon
from uma_trio.gateway.usage import read_usage

BODY = {"prompt": "Once upon a time", "max_tokens": 4, "stream": False}


def test_usage_on_a_full_disk(tmp_path: Path) -> None:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    file = tmp_path / "keys.yaml"
    key = invoke("keys", "create", "a", "--quota", "1000000/month", "--file", file).stdout.split()[-1]
    flags = ("--http", "0", "--http-keys", str(file), "--state-dir", str(tmp_path / "state"))
    with real_daemon(*flags, folder=tmp_path) as daemon:
        gateway = Gateway.of(daemon)
        pid = daemon.metrics()["gateway"]["pid"]
        with gateway.http(headers={"authorization": f"Bearer {key}"}) as client, Canary(daemon):

            def ask(n: int) -> int:
                """Ask ``n`` times; returns the tokens of the tenant on disk."""
                for _ in range(n):
                    client.post("/v1/generate", json=BODY).raise_for_status()
                return sum(read_usage(tmp_path / "state" / "usage.sqlite").values())

            each = ask(1)
            assert each > 4
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
            assert ask(5) == each
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            assert ask(1) == 7 * each
        assert daemon.metrics()["gateway"]["restarts_total"] == 0
    assert "usage.sqlite" in daemon.logs()
