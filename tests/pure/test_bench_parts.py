"""Parts of the benches that need no server: the HTTP reader and the pinning of cores."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.support.bench_scripts import FOLDER, bench_script
from uma_trio.cli.bench import without_checkout
from uma_trio.client import BrokenProtocol

SCRIPTS = sorted(file.name for file in FOLDER.glob("*.py") if "__main__" in file.read_text())


def test_the_help_of_the_command_names_every_bench() -> None:
    suite = bench_script("suite")
    run = {bench.script for bench in suite.BENCHES}
    for name in [found.name for found in (*suite.BENCHES, *suite.GPU_BENCHES)]:
        assert re.search(rf"^ *{name} +", suite.command.help, re.MULTILINE), name
    for script in set(SCRIPTS) - run - {"make_model.py", "make_adapter.py", "make_projector.py"}:  # for the others
        assert script in suite.command.help


def test_the_command_of_a_wheel_says_where_the_benches_are(tmp_path: Path) -> None:
    done = CliRunner().invoke(without_checkout, ["--quick", "--benches", str(tmp_path)])
    assert done.exit_code == 2
    assert f"no benchmarks in {tmp_path}" in done.stderr


def test_the_command_of_a_wheel_runs_the_benches_of_a_checkout() -> None:
    done = CliRunner().invoke(without_checkout, ["--benches", str(FOLDER), "--only", "none"])
    assert done.exit_code == 2
    assert "'none' is not one of 'mixed'" in done.stderr


llama_http, pinning = bench_script("llama_http"), bench_script("pinning")

HEAD = b"HTTP/1.1 200 OK\r\nServer: llama.cpp\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENTS = [
    b'{"content":"a","stop":false}',
    b'{"content":"\xc3\xbc"}',
    b'{"content":"","stop":true,"tokens_predicted":2}',
]


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def response(*, per_chunk: int = 1, comment: bytes = b"") -> bytes:
    """The events in chunks of ``per_chunk`` bytes; with 1, in chunks of one event."""
    body = [b"data: " + event + b"\n\n" for event in EVENTS]
    if comment:
        body.insert(1, comment + b"\n\n")
    if per_chunk > 1:
        whole = b"".join(body)
        body = [whole[at : at + per_chunk] for at in range(0, len(whole), per_chunk)]
    return HEAD + b"".join(map(chunk, body)) + chunk(b"")


@pytest.mark.parametrize(
    "data", [response(), response(per_chunk=7), response(per_chunk=1000), response(comment=b": ping")]
)
@pytest.mark.parametrize("step", [1, 3, 10_000])
def test_events_do_not_depend_on_how_the_bytes_arrive(data: bytes, step: int) -> None:
    reader, found = llama_http.EventReader("llama-server"), []
    for at in range(0, len(data), step):
        assert not reader.ended
        found += reader.receive_data(data[at : at + step])
    assert reader.ended
    assert found == EVENTS


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (
            b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\n\r\n" + b'{"error":"Loading model"}',
            "Loading model",
        ),
        (b"HTTP/1.1 400 Bad Request\r\n", "400 Bad Request"),
        (b"", "nothing"),
        (HEAD + chunk(b"data: {}\n\n"), "in the middle"),
        (HEAD + chunk(b"error: out of luck\n\n"), "out of luck"),
    ],
)
def test_invalid_responses(data: bytes, complaint: str) -> None:
    reader = llama_http.EventReader("llama-server")
    with pytest.raises(BrokenProtocol, match=complaint):
        for part in (data, b"") if data else (b"",):
            reader.receive_data(part)


def test_no_pins() -> None:
    assert pinning.parse_pins("none", 1) is None


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="only Linux pins processes to cores")
class TestPins:
    @pytest.fixture(autouse=True)
    def four_cores(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})

    @pytest.mark.parametrize(
        ("text", "threads", "server", "client"),
        [
            ("auto", 1, {0, 1, 2}, {3}),
            ("auto", 3, {0, 1, 2}, {3}),
            ("0:1", 4, {0}, {1}),
            ("0,2-3:1", 1, {0, 2, 3}, {1}),
        ],
    )
    def test_valid_pins(self, text: str, threads: int, server: set[int], client: set[int]) -> None:
        assert pinning.parse_pins(text, threads) == pinning.Pins(frozenset(server), frozenset(client))

    def test_auto_leaves_each_compute_thread_a_core(self) -> None:
        assert pinning.parse_pins("auto", 4) is None

    @pytest.mark.parametrize(
        ("text", "complaint"),
        [("0", "not auto, none"), ("0:x", "not a list of cores"), (":1", "not a list"), ("0:9", "may not use cores 9")],
    )
    def test_invalid_pins(self, text: str, complaint: str) -> None:
        with pytest.raises(ValueError, match=complaint):
            pinning.parse_pins(text, 1)
