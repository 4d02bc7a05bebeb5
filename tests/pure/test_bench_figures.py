"""What the benches make of what they saw: which requests were good, which texts go round in circles."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import pytest

from tests.support.bench_scripts import FOLDER, bench_script
from tests.support.cases import all_cases
from uma_trio.demo.recording import Answer, Question
from uma_trio.engine_link.devices import Device, Devices

psutil = pytest.importorskip("psutil", reason="the benches need the dev extra: ./build_llama.sh --dev")

NAMES = ("open_load", "lookup", "measure", "command", "recovery", "recovery_load", "held")


@pytest.fixture(scope="module")
def benches() -> dict[str, ModuleType]:
    return {name: bench_script(name) for name in NAMES}


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

suite = bench_script("suite")
BENCHES, GPU_BENCHES, Outcome, Settings = suite.BENCHES, suite.GPU_BENCHES, suite.Outcome, suite.Settings


def settings(**changes: Any) -> Any:
    fields = {"quick": False, "rival": False, "model": Path("/m.gguf"), "threads": 2, "has_matplotlib": True}
    return Settings(folder=FOLDER, out=Path("/out"), **{**fields, **changes})


@all_cases("benches", [BENCHES, GPU_BENCHES])
def test_every_bench_is_a_script_with_a_name_of_its_own(benches: tuple[Any, ...]) -> None:
    assert len({bench.name for bench in benches}) == len(benches)
    for bench in benches:
        assert (FOLDER / bench.script).exists()


def test_a_rival_is_for_those_that_have_one() -> None:
    assert "pareto" not in [bench.name for bench in suite.chosen((), rival=False)]
    assert [bench.name for bench in suite.chosen(("ipc", "pareto"), rival=True)] == ["pareto", "ipc"]


@all_cases("bench", [*BENCHES, *GPU_BENCHES])
@all_cases("quick", [False, True])
def test_the_command_of_a_bench(bench: Any, quick: bool) -> None:
    command = settings(quick=quick).command(bench)
    assert command[:2] == [sys.executable, str(FOLDER / bench.script)]
    assert ("/m.gguf" in command) is not bench.embedded
    assert (f"/out/{bench.name}.csv" in command) is bench.csv
    assert (f"/out/{bench.name}.png" in command) is bench.has_plot
    assert "--plot" not in settings(has_matplotlib=False).command(bench)
    if bench.serve:
        assert command[command.index("--") + 1 :] == bench.serve.split()


def test_the_results_of_a_set_are_kept_step_by_step(tmp_path: Path) -> None:
    where = settings(quick=True, rival=True)
    where = attrs.evolve(where, out=tmp_path)
    devices = Devices(backend="cuda", found=(Device("CUDA0", "a card", "gpu", 60, 80),))
    first, second, third = GPU_BENCHES[:3]
    (tmp_path / f"{first.name}.csv").write_text("run,wall_s\n1,2.5\n2,2.6\n")
    (tmp_path / f"{second.name}.csv").write_text("run,wall_s\n1,0.5\n2")  # ended in the middle of a row
    ends = [(first, 0, False), (second, 0, True), (third, 3, False)]
    outcomes: list[Any] = []
    for bench, code, cut_off in ends:
        outcomes.append(
            Outcome(bench=bench, command=["x"], code=code, duration_s=1.0, stdout="", stderr="", cut_off=cut_off)
        )
        found = json.loads(suite.write_results(where, outcomes, devices, "uma-trio bench").read_text())
        assert len(found["steps"]) == len(outcomes)
    assert found["devices"][0]["name"] == "CUDA0"
    assert [(each["state"], len(each["rows"])) for each in found["steps"]] == [
        ("done", 2),
        ("cut off", 1),
        ("failed with 3", 0),
    ]
    assert found["steps"][0]["rows"][1] == {"run": "2", "wall_s": "2.6"}


def test_a_table_becomes_html_and_nothing_in_it_does() -> None:
    shown = suite.suite_report._table("| a | b<c |\n| - | -: |\n| 1 | <b> |\n")
    assert shown.count("<tr>") == 2
    assert "<th>b&lt;c</th>" in shown
    assert "<td>&lt;b&gt;</td>" in shown


# -- crashes of the engine --------------------------------------------------------------------------


def test_a_difference_names_the_answer_and_the_character(benches: dict[str, Any]) -> None:
    expected = (("one two", "stop"), ("three", "length"))
    difference = benches["recovery_load"]._difference
    assert difference(expected, (("one two", "stop"), ("thrive", "length"))).startswith("answer 1, character 3: 'ive'")
    assert "character 5: '' (stop) instead of '' (length)" in difference(expected, (expected[0], ("three", "stop")))
    assert "character 3: '' (stop) instead of ' two' (stop)" in difference(expected, (("one", "stop"), expected[1]))


def test_only_shared_memory_of_the_daemons_own_counts(
    benches: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, process = benches["held"], psutil.Process()
    for name in (f"uma{process.pid}-0-bin-shm", f"x.{process.pid}.y", f"uma{process.pid}1-0-bin-shm", "another's"):
        (tmp_path / name).touch()
    monkeypatch.setattr(held, "SHARED_MEMORY", tmp_path)
    assert held._files_of(process) == 2


def test_only_what_has_become_more_is_leaked(benches: dict[str, Any]) -> None:
    before = {"processes": 3, "cells": 0, "descriptors": 20}
    leaks = benches["held"].leaks
    assert leaks(before, before) == []
    assert leaks(before, {"processes": 2, "cells": 5, "descriptors": 21}) == ["cells", "descriptors"]


def test_every_stream_of_a_kind_has_requests_of_this_kind(benches: dict[str, Any]) -> None:
    load = benches["recovery_load"]
    made = load.streams(load.EMBEDDED, [*load.KINDS], 6, 50, 1)
    assert [stream.kind for stream in made] == ["greedy", "seeded", "choices", "sessions", "greedy", "seeded"]
    assert [stream.n_sequences for stream in made] == [1, 1, load.N_CHOICES, 1, 1, 1]
    turns = [[turn for each in stream.conversations for turn in each.turns] for stream in made]
    assert all(turn["temperature"] == 0 for turn in turns[0])
    assert all(turn["temperature"] and "n" not in turn for turn in turns[1])
    assert all(turn["n"] == load.N_CHOICES for turn in turns[2])
    assert all(len(each.turns) == load.TURNS and each.is_session for each in made[3].conversations)
    again = load.streams(load.EMBEDDED, [*load.KINDS], 6, 50, 1)
    assert [[turn for each in stream.conversations for turn in each.turns] for stream in again] == turns


@pytest.mark.parametrize(
    ("wrong", "restarts", "loaded", "held", "problems"),
    [
        ([], 1, 5, 0, []),
        (["x"], 1, 5, 0, []),
        ([], 2, 5, 0, ["RESTARTS: 2 for 1 crashes"]),
        ([], 1, 0, 0, ["NO SWAPS"]),
        ([], 1, 5, 7, ["LEAKED: cells: 0 before, 7 after"]),
    ],
)
def test_what_makes_a_run_with_crashes_bad(
    benches: dict[str, Any], wrong: list[str], restarts: int, loaded: int, held: int, problems: list[str]
) -> None:
    recovery, load = benches["recovery"], benches["recovery_load"]
    stream = load.LoadedStream("sessions 0", "sessions", [])
    stream.wrong += wrong
    report = recovery.Report(
        [stream], restarts=restarts, swaps={"loaded_total": loaded}, before={"cells": 0}, after={"cells": held}
    )
    report.recoveries.append(recovery.Recovery(signal="kill", moment="any", next_token_ms=1.0, all_streams_ms=2.0))
    assert [found[: len(says)] for found, says in zip(report.problems, problems, strict=True)] == problems
    assert report.is_good == (not wrong and not problems)
