"""``uma-trio perf report``: what it shows, and what it says of files that are none."""

import builtins
import importlib.util
import json
from pathlib import Path
from typing import Any

import attrs
import click
import pytest
from click.testing import CliRunner, Result

from tests.support.perf_runs import HEADER, as_bytes, simulated
from uma_trio.cli import main
from uma_trio.cli.perf import command
from uma_trio.telemetry.perf_format import Run, decode, encode_header
from uma_trio.telemetry.perf_records import RequestRecord, TickRecord, Trailer
from uma_trio.telemetry.perf_summary import summarise

needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="plots need the dev extra: ./build_llama.sh --dev"
)


def report(*args: object) -> Result:
    return CliRunner().invoke(main, ["perf", "report", *map(str, args)], prog_name="uma-trio")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    file = tmp_path / "perf.cborseq"
    file.write_bytes(as_bytes(simulated()))
    return file


def flat(result: Result) -> str:
    return " ".join(result.output.split())


# -- what it shows ------------------------------------------------------------------------------------


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


def test_the_tables_hold_the_figures(log: Path) -> None:
    [run] = decode(log.read_bytes())
    found = summarise(run)
    result = report(log)
    assert result.exit_code == 0
    shown = flat(result)
    assert "some-model.gguf llama 1B Q8_0" in shown
    assert f"{found.tokens:,} generated" in shown
    for name, values in (("between tokens", found.itl_ms), ("to the first token", found.ttft_ms)):
        assert f"{name} {values.n:,} {values.p50:,.1f} {values.p95:,.1f} {values.p99:,.1f} {values.max:,.1f}" in shown
    assert found.shares is not None
    assert f"idle for {100 * found.shares.device_idle:.1f} % of it" in shown
    assert f"with prompts {found.mixed.ticks}" in shown
    assert f"{found.accepted:,} of {found.drafted:,}" in shown
    assert f"{found.cached_tokens:,} of {found.asked_tokens:,}" in shown
    for tick in found.longest:
        assert f"{tick.t_s:,.3f} {tick.ms:,.1f}" in shown
    assert max(map(len, result.output.splitlines())) <= 100
    assert "incomplete" not in shown
    assert "not ended" not in shown


def test_json_is_the_summary(log: Path) -> None:
    [run] = decode(log.read_bytes())
    found = json.loads(report(log, "--json").output)
    assert found["runs_in_log"] == 1
    assert found["runs"] == [json.loads(json.dumps({"run": 1, **attrs.asdict(summarise(run))}))]


def test_which_run(tmp_path: Path) -> None:
    file = tmp_path / "perf"
    runs = [
        attrs.evolve(simulated(seed, requests=3), header=attrs.evolve(HEADER, model=f"model-{seed}"))
        for seed in (1, 2, 3)
    ]
    file.write_bytes(b"".join(map(as_bytes, runs)))

    def models(*args: object) -> list[str]:
        return [run["header"]["model"] for run in json.loads(report(file, "--json", *args).output)["runs"]]

    assert models() == models("--run", "last") == models("--run", "3") == ["model-3"]
    assert models("--run", "1") == ["model-1"]
    assert models("--run", "all") == ["model-1", "model-2", "model-3"]
    assert "run 2 of 3" in report(file, "--run", "2").output
    assert [report(file, "--run", "all").output.count(f"model-{n}") for n in (1, 2, 3)] == [1, 1, 1]
    for wrong in ("4", "0", "-1", "first", ""):
        result = report(file, "--run", wrong)
        assert result.exit_code == 2
        assert "--run is last, all, or a number up to 3" in result.output


def test_parts_of_one_log(tmp_path: Path) -> None:
    run = simulated()
    older, newer = tmp_path / "perf.1", tmp_path / "perf"
    older.write_bytes(as_bytes(Run(header=HEADER, ticks=run.ticks[:700])))
    newer.write_bytes(as_bytes(attrs.evolve(run, ticks=run.ticks[700:])))
    found = json.loads(report(older, newer, "--json").output)
    assert (found["runs_in_log"], found["runs"][0]["ticks"]) == (1, len(run.ticks))


def test_a_run_without_ticks_has_tables_too(tmp_path: Path) -> None:
    file = tmp_path / "perf"
    file.write_bytes(encode_header(attrs.evolve(HEADER, llama_cpp=None, description="")))
    result = report(file)
    assert result.exit_code == 0
    assert "none has ended" in result.output
    assert "not ended: the daemon still runs, was killed, or could not write any more" in result.output
    assert "idle for - of it" in result.output


def test_what_is_missing_is_told(tmp_path: Path, log: Path) -> None:
    log.write_bytes(log.read_bytes()[:-20])
    assert "incomplete: its last record is cut off after" in report(log).output
    log.write_bytes(as_bytes(attrs.evolve(simulated(), trailer=Trailer(dropped=1234))))
    assert "1,234 records were dropped" in report(log).output


# -- files that are none ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (None, "there is no {file}; uma-trio serve --perf-log {file} writes one"),
        (b"", "{file} is no perf log that can be read: the file is empty"),
        (b"GGUF....", "{file} is no perf log that can be read: it does not begin with a perf log's header"),
        (encode_header(HEADER)[:40], "{file} is no perf log that can be read: it ends within its first header"),
        (encode_header(attrs.evolve(HEADER, version=9)), "its format has version 9, and this uma-trio reads version 1"),
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


# -- plots --------------------------------------------------------------------------------------------


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


@needs_matplotlib
def test_the_picture(log: Path, tmp_path: Path) -> None:
    from matplotlib import image

    target = tmp_path / "a.png"
    result = report(log, "--plot", target)
    assert result.exit_code == 0, result.output
    assert "Latency in ms" in result.output
    pixels = image.imread(target)[..., :3]
    assert pixels.shape[0] > 900
    assert ((pixels.max(axis=-1) - pixels.min(axis=-1)) > 0.2).mean() > 0.05
    assert report(log, "--plot", tmp_path / "b.svg", "--at", "12.5").exit_code == 0
    assert b"<svg" in (tmp_path / "b.svg").read_bytes()


@needs_matplotlib
@pytest.mark.parametrize(
    "run",
    [
        Run(header=HEADER),
        Run(header=HEADER, ticks=[TickRecord(t_s=1.0)]),
        Run(header=HEADER, ticks=[TickRecord(t_s=1.0, seq_ids=(0,), decode_ms=5.0, predicted_ms=5.0)]),
        Run(
            header=HEADER,
            requests=[
                RequestRecord(id="r", arrived_s=0.0, first_token_s=0.0, ended_s=0.0, reason="stop", itl_ms=[0.0])
            ],
        ),
        attrs.evolve(simulated(requests=1), header=attrs.evolve(HEADER, scheduling={}, description="")),
        Run(
            header=HEADER,
            ticks=[TickRecord(t_s=float(n), seq_ids=tuple(range(256)), decode_ms=900.0) for n in range(3)],
        ),
    ],
    ids=["nothing", "an empty tick", "one tick", "one request", "one simulated", "256 streams"],
)
def test_pictures_of_little_and_of_much(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "perf"
    file.write_bytes(as_bytes(run))
    result = report(file, "--plot", tmp_path / "a.png")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "a.png").stat().st_size > 10_000


@needs_matplotlib
def test_pictures_that_cannot_be_written(log: Path, tmp_path: Path) -> None:
    for target, said in (
        (tmp_path / "a.xyz", "not supported"),
        (tmp_path / "no" / "a.png", "No such file or directory"),
    ):
        result = report(log, "--plot", target)
        assert result.exit_code == 2
        assert f"cannot write {target}" in result.output
        assert said in result.output
    log.write_bytes(
        as_bytes(simulated(1)) + as_bytes(attrs.evolve(simulated(2), header=attrs.evolve(HEADER, model="b")))
    )
    result = report(log, "--run", "all", "--plot", tmp_path / "a.png")
    assert (result.exit_code, flat(result)) == (2, "uma-trio perf: --plot draws one run: say which with --run")
