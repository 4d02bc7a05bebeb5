"""The bench that uses aiperf: its cells, aiperf's arguments and export, the table."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import click
import pytest

from tests.support.bench_scripts import bench_script
from tests.support.cases import all_cases

pytest.importorskip("psutil", reason="the benches need the dev extra: ./build_llama.sh --dev")


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return bench_script("public_load")


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    return bench_script("public_generator")


# -- cells -------------------------------------------------------------------------------------


def test_all_cells_can_be_given_by_their_names(bench: Any) -> None:
    cells = bench.chosen([], everything=True)
    assert [str(cell) for cell in cells] == list(bench.ALL)
    assert bench.chosen([str(cell) for cell in cells], everything=False) == cells
    assert bench.chosen([], everything=False) == cells[:1]
    assert bench.chosen([bench.DEFAULT, bench.DEFAULT], everything=True) == cells


@all_cases(
    ("text", "complaint"),
    [
        ("embeddings/8/8/8", "completions/ or chat/"),
        ("chat/8/8", "is not ENDPOINT/PROMPT/ANSWER/CONCURRENCY"),
        ("chat/0/8/8", "from 1 to"),
        ("chat/8/8/100000", "from 1 to 1024"),
        ("chat/8/9999999999999999999999/8", "from 1 to"),
        ("chat/8/8/x", "'x' is not a number"),
        ("chat/8/8/8/shared=8", "from 0 to 7"),
        ("chat/8/8/8/turns", "'' is not a number"),
        ("chat/8/8/8/users=2", "more than shared"),
        ("completions/8/8/8/turns=2", "only chat has turns"),
    ],
)
def test_what_is_no_cell(bench: Any, text: str, complaint: str) -> None:
    with pytest.raises(click.BadParameter, match=complaint):
        bench.chosen([text], everything=False)


def test_a_sequence_has_room_for_its_whole_conversation(generator: Any) -> None:
    one, four = (generator.parse_cell(f"chat/200/60/8/turns={turns}").room for turns in (1, 4))
    assert 200 + 60 < one < 4 * (200 + 60) < four


def options(given: list[str]) -> dict[str, str]:
    return {name: value for name, value in zip(given, [*given[1:], ""], strict=True) if name.startswith("--")}


def test_arguments_of_a_closed_loop(generator: Any) -> None:
    place = {"model": "m", "url": "http://127.0.0.1:1", "tokenizer": Path("t"), "out": Path("o"), "seed": 3}
    found = options(generator.arguments(generator.parse_cell("completions/800/60/8/shared=600"), 24, **place))
    wanted = {"--isl": "200", "--prefix-prompt-length": "600", "--osl": "60", "--concurrency": "8"}
    assert wanted.items() <= found.items()
    assert (found["--request-count"], found["--random-seed"]) == ("24", "3")
    assert int(found["--num-dataset-entries"]) >= 24 + int(found["--warmup-request-count"]), "no prompt comes twice"
    assert json.loads(found["--extra-inputs"])["ignore_eos"] is True


def test_arguments_of_conversations(generator: Any) -> None:
    place = {"model": "m", "url": "http://127.0.0.1:1", "tokenizer": Path("t"), "out": Path("o"), "seed": 3}
    found = options(generator.arguments(generator.parse_cell("chat/200/60/8/turns=4"), 25, **place))
    assert (found["--num-sessions"], found["--session-turns-mean"]) == ("7", "4"), "25 requests, in whole conversations"
    assert "--request-count" not in found


# -- what aiperf measured ----------------------------------------------------------------------

EXPORT = {
    "schema_version": "1.4",
    "request_throughput": {"unit": "requests/sec", "avg": 0.5},
    "request_latency": {"unit": "ms", "avg": 1900.0, "p99": 2600.0},
    "time_to_first_token": {"unit": "ms", "avg": 880.0, "p99": 1450.0},
    "inter_token_latency": {"unit": "ms", "avg": 68.0, "p99": 101.0},
    "inter_chunk_latency": {"unit": "ms", "avg": 68.0, "p99": 230.0},
    "benchmark_duration": {"unit": "sec", "avg": 48.0},
    "usage_prompt_tokens": {"unit": "tokens", "avg": 801.0},
    "usage_completion_tokens": {"unit": "tokens", "avg": 60.0},
    "error_request_count": {"unit": "requests", "avg": 2.0},
    "error_summary": [],
}


def test_the_figures_of_an_export(generator: Any) -> None:
    found = generator.read_export(EXPORT)
    assert attrs.astuple(found) == (
        48.0,
        0.5,
        880.0,
        1450.0,
        68.0,
        101.0,
        230.0,
        1900.0,
        2600.0,
        801.0,
        60.0,
        None,
        2.0,
    )


def test_an_export_without_an_answer(generator: Any) -> None:
    found = generator.read_export({"error_request_count": {"avg": 24}})
    assert found.errors == 24
    assert {value for name, value in attrs.asdict(found).items() if name != "errors"} == {None}


def test_the_table_has_both_servers_and_their_ratios(bench: Any, generator: Any) -> None:
    rival = generator.read_export(EXPORT)
    mine = attrs.evolve(rival, wall_s=60.0, ttft_ms=440.0, errors=0.0)
    cell = generator.parse_cell(bench.DEFAULT)
    header, _, *rows = bench.show({cell: {"llama-server": rival, "uma-trio": mine}}).splitlines()
    parts = [[part.strip() for part in row.strip("|").split("|")] for row in rows]
    assert [row[0] for row in parts] == [f"{cell} {what}" for what in ("llama-server", "uma-trio", "ratio")]
    assert parts[2][1:10] == ["1.25", "1.00", "0.50", *["1.00"] * 6]
    assert [row[-1] for row in parts] == ["2", "0", ""]
    assert header.count("|") == len(bench.NAMES) + 2


def test_a_table_of_one_server(bench: Any, generator: Any) -> None:
    cell = generator.parse_cell(bench.DEFAULT)
    assert "ratio" not in bench.show({cell: {"uma-trio": generator.read_export(EXPORT)}})


def test_errors_of_all_runs_count(bench: Any, generator: Any) -> None:
    runs = [generator.read_export(EXPORT), generator.read_export({**EXPORT, "error_request_count": None})]
    assert bench.summary(runs).errors == 2
    assert bench.summary(runs).wall_s == 48


def test_what_makes_figures_hard_to_compare_is_said(bench: Any, generator: Any) -> None:
    cell = generator.parse_cell(bench.DEFAULT)
    good = attrs.evolve(generator.read_export(EXPORT), errors=0.0, cached_tokens=1.0)
    assert bench.oddities(cell, "uma-trio", good) == []
    bad = attrs.evolve(good, errors=3.0, answer_tokens=58.5, cached_tokens=400.0)
    found = " ".join(bench.oddities(cell, "uma-trio", bad))
    for text in ("3 requests failed", "58.5 tokens an answer instead of 60", "400 tokens of each prompt"):
        assert text in found


# -- the environment ---------------------------------------------------------------------------


def test_a_folder_without_aiperf(generator: Any, tmp_path: Path) -> None:
    with pytest.raises(bench_script("rigs").RivalError, match=r"pip install aiperf==.*or omit --aiperf"):
        generator.given(tmp_path)


async def test_an_environment_that_cannot_be_made(generator: Any, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(bench_script("rigs").RivalError, match=r"cannot be installed .*(?s:.*)--aiperf"):
        await generator.made(blocked / "folder")
