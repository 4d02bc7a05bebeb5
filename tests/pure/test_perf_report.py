"""``uma-trio perf report``: its figures and its errors."""

import builtins
import gzip
import json
from pathlib import Path
from typing import Any

import attrs
import click
import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace

from tests.support.perf_runs import HEADER, encode_run, simulated
from uma_trio.cli import main
from uma_trio.cli.perf import command
from uma_trio.telemetry.perf_records import Run, Trailer, decode, encode
from uma_trio.telemetry.perf_summary import summarise


def report(*args: object) -> Result:
    return CliRunner().invoke(main, ["perf", "report", *map(str, args)], prog_name="uma-trio")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    file = tmp_path / "perf.jsonl"
    file.write_bytes(encode_run(simulated()))
    return file


def flat(result: Result) -> str:
    return " ".join(result.output.split())


# -- figures ------------------------------------------------------------------------------------


def test_every_option_explains_itself() -> None:
    assert isinstance(command, click.Group)
    for name, found in command.commands.items():
        assert found.help
        shown = CliRunner().invoke(main, ["perf", name, "--help"], prog_name="uma-trio").output
        for option in found.params:
            if isinstance(option, click.Option):
                assert option.help
                assert option.help.rstrip().endswith((".", "]", "(needs matplotlib)."))
                assert all(flag in shown for flag in option.opts)


def test_the_text_has_all_figures(log: Path) -> None:
    [run] = decode(log.read_bytes())
    found = summarise(run)
    result = report(log)
    assert result.exit_code == 0
    shown = flat(result)
    assert "some-model.gguf description llama 1B Q8_0" in shown
    for name, value in found.items():
        if isinstance(value, int) and not isinstance(value, bool):
            assert f"{name} {value} " in shown
    for name, row in (found["latency_ms"] | found["prediction_error"]).items():
        numbers = [f"{value:,.3f}" for key, value in row.items() if key != "n"]
        assert f" {name} {row['n']} {' '.join(numbers)}" in shown
    for name, share in found["time_share"].items():
        assert f"{name} {share:.3f}" in shown
    for tick in found["longest_ticks"]:
        assert f"{tick['start_s']:,.3f} {tick['duration_ms']:,.3f}" in shown
    assert "closed yes dropped_records 0 unreadable_lines 0" in shown
    assert max(map(len, result.output.splitlines())) <= 110


def test_json_is_the_summary(log: Path) -> None:
    [run] = decode(log.read_bytes())
    expected = {"run": 1, "runs_in_log": 1, **summarise(run)}
    assert json.loads(report(log, "--json").output) == json.loads(json.dumps(expected))


def test_which_run(tmp_path: Path) -> None:
    file = tmp_path / "perf"
    runs = [
        attrs.evolve(simulated(seed, requests=3), header=replace(HEADER, model=f"model-{seed}")) for seed in range(1, 4)
    ]
    file.write_bytes(b"".join(map(encode_run, runs)))

    def model(*args: object) -> str:
        return str(json.loads(report(file, "--json", *args).output)["header"]["model"])

    assert model() == model("--run", "3") == "model-3"
    assert model("--run", "1") == "model-1"
    assert "run 2 runs_in_log 3 " in flat(report(file, "--run", "2"))
    for wrong in ("4", "0", "-1"):
        result = report(file, "--run", wrong)
        assert result.exit_code == 2
        assert "--run must be a number from 1 to 3" in result.output


def test_files_of_one_log(tmp_path: Path) -> None:
    run = simulated()
    older, newer = tmp_path / "perf.1", tmp_path / "perf"
    older.write_bytes(gzip.compress(encode_run(Run(header=HEADER, ticks=run.ticks[:700]))))
    newer.write_bytes(encode_run(attrs.evolve(run, ticks=run.ticks[700:])))
    found = json.loads(report(older, newer, "--json").output)
    assert (found["runs_in_log"], found["ticks"]) == (1, len(run.ticks))


def test_a_run_without_ticks_has_tables_too(tmp_path: Path) -> None:
    file = tmp_path / "perf"
    file.write_bytes(encode(replace(HEADER, llama_cpp=None, description="")))
    result = report(file)
    assert result.exit_code == 0
    assert "closed no " in flat(result)
    assert "requests none " in flat(result)
    assert "inter_token 0 - - - -" in flat(result)


def test_what_is_missing_is_shown(tmp_path: Path, log: Path) -> None:
    log.write_bytes(log.read_bytes().replace(b'{"kind":"tick"', b'{"kind"', 2))
    assert "unreadable_lines 2 " in flat(report(log))
    log.write_bytes(encode_run(attrs.evolve(simulated(), trailer=Trailer(dropped_records=1234))))
    assert "dropped_records 1234 " in flat(report(log))


# -- files that are no log ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (None, "{file} does not exist; uma-trio serve --perf-log {file} writes it"),
        (b"", "cannot read {file} as a perf log: the file is empty"),
        (b"GGUF....", "cannot read {file} as a perf log: it does not begin with the header of a perf log"),
        (encode(HEADER)[:100], "cannot read {file} as a perf log: its first header is incomplete"),
        (encode(replace(HEADER, version=9)), "its format has version 9; this uma-trio reads version 2"),
    ],
)
def test_no_log_is_one_sentence_and_exit_code_2(tmp_path: Path, data: bytes | None, said: str) -> None:
    file = tmp_path / "perf"
    if data is not None:
        file.write_bytes(data)
    result = report(file)
    assert result.exit_code == 2
    assert said.format(file=file) in result.output
    assert result.output.count("\n") == 1


def test_a_folder_and_no_file_at_all(tmp_path: Path) -> None:
    result = report(tmp_path)
    assert result.exit_code == 2
    assert f"cannot read {tmp_path}: Is a directory" in result.output
    assert report().exit_code == 2


def test_without_matplotlib_the_fix_is_named(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def no_matplotlib(name: str, *args: Any, **options: Any) -> Any:
        if name.split(".")[0] == "matplotlib":
            raise ModuleNotFoundError(f"No module named {name!r}", name="matplotlib")
        return real_import(name, *args, **options)

    monkeypatch.delitem(__import__("sys").modules, "uma_trio.cli.perf_plots", raising=False)
    monkeypatch.setattr(builtins, "__import__", no_matplotlib)
    result = report(log, "--plot", tmp_path / "a.png")
    assert result.exit_code == 2
    assert "pip install matplotlib" in result.output
    monkeypatch.undo()
    assert not (tmp_path / "a.png").exists()
