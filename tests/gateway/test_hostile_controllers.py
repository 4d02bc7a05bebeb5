"""Hostile controllers, uploaded and run over HTTP: each run ends with its own error, and nothing is left of it."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.gateway.conftest import Gateway, HttpCanary
from tests.support.hostile_wasm import FAILING, LOOPING, ROOM, with_custom_section
from tests.support.profile import sampled, thorough
from tests.support.real_daemon import missing, real_daemon
from tests.support.wat_controllers import MID, PRE, controller, returning

SHARED_MEMORY = Path("/dev/shm")
LIMITS = ("--aici-step-ms", "1000", "--aici-init-ms", "3000", "--max-controller-bytes", "4194304")
MAX_BYTES = 4 << 20
ROUNDS = 2
MAX_GROWTH = 150 << 20
"""Memory that all processes may have more after the last round than after the first one.  A round uploads 4 MiB."""
PATIENCE_S = 60

BY_NAME = {each.name: each for each in (*FAILING, *LOOPING)}
FREE = returning(MID)
ALLOWING_ALL = (
    "(memory.fill (i32.const 65536) (i32.const 255) (i32.const 16384))"
    "(call $aici_host_return_logit_bias (i32.const 65536))" + FREE
)

BOMB = "a fork bomb"
HOSTILE = {
    BOMB: (
        controller(pre=returning({**PRE, "num_forks": 2}), mid=ALLOWING_ALL, memory='(memory (export "memory") 64)'),
        "no KV cells to fork into 2 answers|forks into more than 1024 answers",
    ),
    "more forks than sequences": (
        controller(pre=returning({**PRE, "num_forks": 16})),
        "forks an answer into 16, but this daemon computes 8 sequences at a time",
    ),
    "four billion forks": (controller(pre=returning({**PRE, "num_forks": 4_000_000_000})), "forks, at most"),
    "a memory bomb": (BY_NAME["no end of memory in aici_pre_process"].wasm, "out of memory"),
    "a memory bomb at the start": (BY_NAME["no end of memory in aici_init_prompt"].wasm, "out of memory"),
    "an endless loop": (BY_NAME["a loop in aici_mid_process"].wasm, "took too long"),
    "an endless loop at the start": (BY_NAME["a loop in aici_init"].wasm, "took too long"),
    "nonsense": (BY_NAME["aici_mid_process returns no JSON"].wasm, "aici_mid_process returned a wrong result"),
    "a token of no vocabulary": (BY_NAME["a token of no vocabulary"].wasm, "ff_token out of range"),
}

QUICK = {"more forks than sequences", "a memory bomb", "an endless loop at the start", "nonsense"}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("daemon")
    with real_daemon("--http", "0", "--parallel", "8", "--threads", "1", *LIMITS, folder=folder) as daemon:
        yield Gateway.of(daemon)
        left, pid = daemon.processes[1:], daemon.pid
    _, alive = psutil.wait_procs(left, PATIENCE_S)
    assert not alive, "the daemon has left processes behind"
    names = re.compile(rf"(sem\.)?uma{pid}-")
    assert [name for name in os.listdir(SHARED_MEMORY) if names.match(name)] == []


def upload(client: httpx.Client, wasm: bytes) -> str:
    answer = client.post("/v1/controllers", content=wasm)
    assert answer.status_code == 200, answer.text
    module_id: str = answer.json()["module_id"]
    return module_id


def run(client: httpx.Client, module: str, **fields: Any) -> dict[int, dict[str, Any]]:
    """Text, error and reason of each answer of a run; a run that is refused has only the error of answer 0."""
    answer = client.post("/v1/run", json={"controller": module, "max_tokens": 20, **fields}, timeout=PATIENCE_S)
    if answer.status_code != 200:
        assert answer.status_code == 400, answer.text
        return {0: {"text": "", "error": answer.text, "finish_reason": "fail"}}
    *lines, done = [line for line in answer.text.split("\n") if line]
    assert done == "data: [DONE]"
    found: dict[int, dict[str, Any]] = {}
    for line in lines:
        for fork in json.loads(line.removeprefix("data: ")).get("forks", ()):
            seen = found.setdefault(fork["index"], {"text": "", "error": "", "finish_reason": None})
            seen["text"] += fork["text"]
            seen["error"] += fork["error"]
            seen["finish_reason"] = fork.get("finish_reason", seen["finish_reason"])
    return found


def yesno(client: httpx.Client) -> str:
    text: str = run(client, "yesno")[0]["text"]
    return text


@pytest.mark.parametrize("name", sampled([name if name in QUICK else thorough(name) for name in HOSTILE], 12))
def test_a_hostile_run_ends_with_its_own_error(gateway: Gateway, name: str) -> None:
    wasm, error = HOSTILE[name]
    with gateway.http() as client, HttpCanary(gateway) as canary:
        answers = run(client, upload(client, wasm))
        assert all(each["finish_reason"] is not None for each in answers.values()), answers
        failed = [each for each in answers.values() if each["error"]]
        assert failed
        for each in failed:
            assert each["finish_reason"] == "fail"
            assert re.search(error, each["error"]), each["error"]
        assert yesno(client) in ("yes", "no")
    assert canary.rounds
    gateway.daemon.settled()


@pytest.mark.thorough
def test_a_module_of_the_largest_size_runs_and_a_larger_one_is_refused(gateway: Gateway) -> None:
    good = controller(mid=ALLOWING_ALL, memory=ROOM)
    padding = MAX_BYTES - len(with_custom_section(good, b"padding", bytes(MAX_BYTES - 1000))) + MAX_BYTES - 1000
    largest = with_custom_section(good, b"padding", bytes(padding))
    assert len(largest) == MAX_BYTES
    with gateway.http() as client, HttpCanary(gateway) as canary:
        [answer] = run(client, upload(client, largest)).values()
        assert (answer["error"], answer["finish_reason"]) == ("", "length"), answer
        refused = client.post("/v1/controllers", content=largest + b"x")
        assert refused.status_code == 413
        assert "max_controller_bytes" in refused.text
    assert canary.rounds
    gateway.daemon.settled()


@pytest.mark.thorough
def test_nothing_is_left_of_hostile_runs(gateway: Gateway) -> None:
    """Each round uploads modules that nobody has seen, and runs them; processes and memory are then as before."""
    daemon = gateway.daemon
    after = []
    with gateway.http() as client:
        for n in range(ROUNDS):
            for name, (wasm, error) in HOSTILE.items():
                if name == BOMB:  # its thousand answers take seconds, in a test of their own
                    continue
                answers = run(client, upload(client, with_custom_section(wasm, b"round", bytes([n]))))
                assert re.search(error, "\n".join(each["error"] for each in answers.values()))
            padding = bytes([n]) * (MAX_BYTES - 8192)
            assert run(client, upload(client, with_custom_section(controller(), b"padding", padding)))
            assert yesno(client) in ("yes", "no")
            daemon.settled()
            processes = sorted({process.pid for process in long_lived(gateway)})
            after.append((processes, daemon.rss))
    assert {*map(len, [pids for pids, _ in after])} == {len(after[0][0])}
    assert after[0][0] == after[-1][0], "a process has died"
    assert after[-1][1] - after[0][1] < MAX_GROWTH, [rss >> 20 for _, rss in after]
    assert daemon.metrics()["controllers"]["restarts_total"] == 0
    assert daemon.metrics()["controllers"]["sequences"] == 0


def long_lived(gateway: Gateway) -> list[psutil.Process]:
    """The daemon and its children, as soon as no module is being compiled any more."""
    until = time.monotonic() + PATIENCE_S
    while True:
        found = gateway.daemon.processes
        if not any("compiler" in " ".join(each.cmdline()) for each in found):
            return found
        assert time.monotonic() < until, [each.cmdline() for each in found]
        time.sleep(0.05)
