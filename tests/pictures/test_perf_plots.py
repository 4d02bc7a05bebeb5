"""``uma-trio perf report --plot``: the picture of any run."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace

from tests.support.perf_runs import HEADER, encode_run, simulated
from uma_trio.cli import main
from uma_trio.telemetry.perf_records import RequestRecord, Run, TickRecord

image = pytest.importorskip("matplotlib.image", reason="plots need the dev extra: ./build_llama.sh --dev")


def plot(run: Run, folder: Path, target: str) -> Result:
    """Draw ``run`` into the file ``target`` of ``folder``."""
    log = folder / "perf.jsonl"
    log.write_bytes(encode_run(run))
    return CliRunner().invoke(main, ["perf", "report", str(log), "--plot", str(folder / target)], prog_name="uma-trio")


def test_the_picture(tmp_path: Path) -> None:
    result = plot(simulated(), tmp_path, "a.png")
    assert result.exit_code == 0, result.output
    assert "latency_ms" in result.output
    pixels = image.imread(tmp_path / "a.png")[..., :3]
    assert pixels.shape[0] > 900
    assert ((pixels.max(axis=-1) - pixels.min(axis=-1)) > 0.2).mean() > 0.05
    assert plot(simulated(), tmp_path, "b.svg").exit_code == 0
    assert b"<svg" in (tmp_path / "b.svg").read_bytes()


@pytest.mark.parametrize(
    "run",
    [
        Run(header=HEADER),
        Run(header=HEADER, ticks=[TickRecord(start_s=1.0)]),
        Run(header=HEADER, ticks=[TickRecord(start_s=1.0, decode_seq_ids=(0,), decode_ms=5.0, predicted_ms=5.0)]),
        Run(
            header=HEADER,
            requests=[
                RequestRecord(
                    id="r", arrived_s=0.0, first_token_s=0.0, finished_s=0.0, finish_reason="stop", inter_token_ms=[0.0]
                )
            ],
        ),
        attrs.evolve(simulated(requests=1), header=replace(HEADER, scheduling={}, description="")),
        Run(
            header=HEADER,
            ticks=[TickRecord(start_s=float(n), decode_seq_ids=tuple(range(256)), decode_ms=900.0) for n in range(3)],
        ),
    ],
    ids=["nothing", "an empty tick", "one tick", "one request", "one simulated", "256 streams"],
)
def test_pictures_of_little_and_of_much(run: Run, tmp_path: Path) -> None:
    result = plot(run, tmp_path, "a.png")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "a.png").stat().st_size > 10_000


def test_pictures_that_cannot_be_written(tmp_path: Path) -> None:
    for target, said in (("a.xyz", "not supported"), ("no/a.png", "No such file or directory")):
        result = plot(simulated(), tmp_path, target)
        assert result.exit_code == 2
        assert f"cannot write {tmp_path / target}" in result.output
        assert said in result.output
