"""What the benches make of what they saw: which requests were good, which texts go round in circles."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from uma_trio.cli import bench_report
from uma_trio.cli.bench_runs import BENCHES, Settings, chosen
from uma_trio.demo.recording import Answer, Question

pytest.importorskip("psutil", reason="the benches need the dev extra: ./build_llama.sh --dev")

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def benches() -> Iterator[dict[str, ModuleType]]:
    """Modules that import each other as scripts do, from their own folder."""
    sys.path.insert(0, str(ROOT / "benches"))
    try:
        yield {name: importlib.import_module(name) for name in ("open_load", "lookup", "measure", "command")}
    finally:
        sys.path.remove(str(ROOT / "benches"))


def answer(*token_s: float, reason: str | None = "length", tokens: int = 0) -> Answer:
    question = Question(text="", raw=True)
    return Answer(question=question, sent_s=0.0, token_s=list(token_s), reason=reason, completion_tokens=tokens)


@pytest.mark.parametrize(
    ("found", "good"),
    [
        (answer(0.9, 1.0, 1.05), True),
        (answer(1.1, 1.2), False),  # the first token is late
        (answer(0.1, 0.15, 0.3), False),  # a gap is too long
        (answer(0.1, 0.15, reason=None), False),  # it has not ended
        (answer(0.5), True),
        (answer(reason=None), False),
    ],
)
def test_a_good_request(benches: dict[str, Any], found: Answer, good: bool) -> None:
    open_load = benches["open_load"]
    slo = open_load.Slo(ttft_ms=1000, itl_ms=101, of="p99")
    assert slo.good(open_load.Outcome(answer=found)) is good


def test_the_mean_forgives_a_gap(benches: dict[str, Any]) -> None:
    open_load = benches["open_load"]
    found = answer(0.1, 0.15, 0.3)
    assert [open_load.Slo(ttft_ms=1000, itl_ms=101, of=of).meets_itl(found) for of in ("p99", "mean")] == [False, True]


def test_the_same_seed_gives_the_same_requests(benches: dict[str, Any]) -> None:
    mix = benches["open_load"].Mix(short_words=8, short_tokens=10, long_share=0.5, long_words=100, long_tokens=4)
    one, other = mix.requests(3), mix.requests(3)
    some = [next(one) for _ in range(40)]
    assert some == [next(other) for _ in range(40)]
    assert {request.interactive for request in some} == {True, False}
    for request in some:
        words, tokens = len(request.question.text.split()), request.question.max_tokens
        assert (
            (4 <= words <= 12 and 5 <= tokens <= 15)
            if request.interactive
            else (50 <= words <= 150 and 2 <= tokens <= 6)
        )


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("the start " + "ab " * 30, True),
        ("x" * 40, True),
        ("one two three four five six seven eight nine ten", False),
        ("", False),
    ],
)
def test_texts_that_go_round_in_circles(benches: dict[str, Any], text: str, found: bool) -> None:
    assert benches["lookup"].is_loop(text) is found


def test_where_texts_differ(benches: dict[str, Any]) -> None:
    first_difference = benches["lookup"].first_difference
    assert first_difference([["a", "b"], ["c"]], [["a", "b"], ["c"]]) is None
    assert first_difference([["a", "b"], ["c"]], [["a", "x"], ["y"]]) == 1
    assert first_difference([["a", "b"]], [["a", "b", "c"]]) == 3


def test_tokens_that_came_with_others_count(benches: dict[str, Any]) -> None:
    decode_rate = benches["measure"].decode_rate
    assert decode_rate([answer(0, 1, 2, tokens=3)]) == 1.0
    assert decode_rate([answer(0, 1, 2, tokens=6)]) == 2.0
    assert decode_rate([answer(0, 2, tokens=2), answer(5, 6, tokens=2)]) == pytest.approx(2 / 3)


# -- uma-trio bench --------------------------------------------------------------------------------


def settings(**changes: Any) -> Settings:
    fields = {"quick": False, "rival": False, "model": Path("/m.gguf"), "threads": 2, "has_matplotlib": True}
    return Settings(folder=ROOT / "benches", out=Path("/out"), **{**fields, **changes})


def test_every_bench_is_a_script_with_a_name_of_its_own() -> None:
    assert len({bench.name for bench in BENCHES}) == len(BENCHES)
    for bench in BENCHES:
        assert (ROOT / "benches" / bench.script).exists()


def test_a_rival_is_for_those_that_have_one() -> None:
    assert "pareto" not in [bench.name for bench in chosen((), rival=False)]
    assert [bench.name for bench in chosen(("ipc", "pareto"), rival=True)] == ["pareto", "ipc"]


@pytest.mark.parametrize("bench", BENCHES, ids=lambda bench: bench.name)
@pytest.mark.parametrize("quick", [False, True])
def test_the_command_of_a_bench(bench: Any, quick: bool) -> None:
    command = settings(quick=quick).command(bench)
    assert command[:2] == [sys.executable, str(ROOT / "benches" / bench.script)]
    assert ("/m.gguf" in command) is not bench.embedded
    assert (f"/out/{bench.name}.csv" in command) is bench.csv
    assert (f"/out/{bench.name}.png" in command) is bench.has_plot
    assert "--plot" not in settings(has_matplotlib=False).command(bench)


def test_a_table_becomes_html_and_nothing_in_it_does() -> None:
    shown = bench_report._table("| a | b<c |\n| - | -: |\n| 1 | <b> |\n")
    assert shown.count("<tr>") == 2
    assert "<th>b&lt;c</th>" in shown
    assert "<td>&lt;b&gt;</td>" in shown
