"""Learned costs survive a restart, and only for the same model and environment."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.cases import all_cases
from uma_trio.daemon.engines.saved_costs import load_costs, save_costs
from uma_trio.daemon.policy.cost import CostModel, Work
from uma_trio.daemon.policy.decode_split import DecodeCallTimes
from uma_trio.daemon.policy.row_curve import PrefillCurves, RowCurve
from uma_trio.engine.saved_layouts import load_corrections
from uma_trio.models.fingerprint import model_fingerprint


@pytest.fixture
def learned() -> CostModel:
    cost = CostModel(call_times=DecodeCallTimes((0.0, 7.8, 12.8, 13.2)))
    for n in range(40):
        cost = cost.observed(Work(16 * (n % 5), n % 4, 100 * n, 50.0), 5 + 12.0 * (n % 5) + 2 * (n % 4))
    return cost


def test_saved_costs_predict_the_same(tmp_path: Path, learned: CostModel) -> None:
    assert save_costs("a", learned, tmp_path)
    found = load_costs("a", tmp_path)
    assert found is not None
    for work in (Work(64, 3, 500, 100.0), Work(0, 2, 300), Work(0, 30, 9000), Work(512, 0, 0)):
        assert found.predict(work) == pytest.approx(learned.predict(work))


def test_stairs_are_not_measured_again(tmp_path: Path, learned: CostModel) -> None:
    mixed = RowCurve((16, 64, 80, 128), (5.0, 6.0, 12.0, 12.5))
    found = learned.with_curves(PrefillCurves(RowCurve((64, 256), (6.0, 20.0)), mixed, 8))
    assert found.mixed.curves is not None
    found = found.observed(Work(120, 8, 400), 13.0)
    save_costs("a", found, tmp_path)
    loaded = load_costs("a", tmp_path)
    assert loaded is not None
    assert loaded.knows_stairs
    assert (loaded.mixed.curves, loaded.mixed.margins) == (found.mixed.curves, found.mixed.margins)
    save_costs("b", learned, tmp_path)
    assert load_costs("b", tmp_path).knows_stairs is False


@all_cases(
    "change",
    [
        {"margins": [0.5] * 12},
        {"margins": [0.05]},
        {"curves": []},
        {"curves": {"prompt": {"rows": [1, 2], "ms": [2.0, 1.0]}, "mixed": None, "n_decodes": 0}},
        {"curves": {"prompt": {"rows": [2, 2], "ms": [1.0, 1.0]}, "mixed": None, "n_decodes": 0}},
        {"curves": {"prompt": {"rows": [0, 2], "ms": [1.0, 1.0]}, "mixed": None, "n_decodes": 0}},
        {"curves": {"prompt": {"rows": [1], "ms": [1.0]}, "mixed": None, "n_decodes": 0}},
        {"curves": {"prompt": {"rows": [1, 2], "ms": [1.0, 1.0]}, "mixed": {}, "n_decodes": 0}},
        {"curves": {"prompt": {"rows": [1, 2], "ms": [1.0, 1.0]}, "mixed": None, "n_decodes": -1}},
    ],
)
def test_damaged_curves_are_ignored(tmp_path: Path, learned: CostModel, change: dict[str, object]) -> None:
    save_costs("a", learned, tmp_path)
    file = tmp_path / "a.json"
    fields = json.loads(file.read_bytes())
    fields["mixed"].update(change)
    file.write_text(json.dumps(fields))
    assert load_costs("a", tmp_path) is None


def test_loaded_costs_are_less_certain(tmp_path: Path, learned: CostModel) -> None:
    """New measurements count for more than those of an earlier run."""
    save_costs("a", learned, tmp_path)
    found, work = load_costs("a", tmp_path), Work(64, 3, 500, 100.0)
    assert found is not None
    slower = 1.4 * learned.predict(work)
    assert found.observed(work, slower).predict(work) > 1.02 * learned.observed(work, slower).predict(work)


def test_a_missing_file_is_ignored(tmp_path: Path) -> None:
    assert load_costs("a", tmp_path) is None
    assert load_costs("a", tmp_path / "there is no such folder") is None


@all_cases(
    "harm",
    [
        lambda data: data[: len(data) // 2],
        lambda data: b"",
        lambda data: b"[]",
        lambda data: b"[" * 50_000,
        lambda data: b"\xff" * 100,
        lambda data: data.replace(b'"decode_only"', b'"along"'),
        lambda data: _with(data, coefficients=[1, 2, 3]),
        lambda data: _with(data, coefficients=[1, 2, 3, 4, -5]),
        lambda data: _with(data, coefficients=[1, 2, 3, 4, 1e300]),
        lambda data: _with(data, coefficients=[1, 2, 3, 4, None]),
        lambda data: _with(data, information=[[0.0] * 5] * 5),
        lambda data: _with(data, n_observed=-1),
    ],
)
def test_a_damaged_file_is_ignored(tmp_path: Path, learned: CostModel, harm, caplog: pytest.LogCaptureFixture) -> None:
    caplog.clear()
    save_costs("a", learned, tmp_path)
    file = tmp_path / "a.json"
    file.write_bytes(harm(file.read_bytes()))
    assert load_costs("a", tmp_path) is None
    assert [record.message for record in caplog.records] == ["a measurement cannot be used, so it is made again"]


@pytest.mark.parametrize("content", ['{"CUDA0": 1.2, "CPU": "1.1"}', "[1.0]", "{", "[" * 50_000])
def test_damaged_corrections_are_ignored_as_a_whole(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.json").write_text(content)
    assert load_corrections("a", tmp_path) == {}
    assert len(caplog.records) == 1


def _with(data: bytes, **changes: object) -> bytes:
    fields = json.loads(data)
    fields["decode_only"].update(changes)
    return json.dumps(fields).encode()


def test_a_failure_to_write_is_ignored(tmp_path: Path, learned: CostModel) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    assert not save_costs("a", learned, blocked)


def test_fingerprints_differ_by_model_and_facts(tmp_path: Path) -> None:
    model, other = tmp_path / "a.gguf", tmp_path / "b.gguf"
    model.write_bytes(b"GGUF" + bytes(3 << 20))
    other.write_bytes(b"GGUF" + bytes(3 << 20) + b"!")
    names = {
        model_fingerprint(model, 1),
        model_fingerprint(model, 2),
        model_fingerprint(other, 1),
        model_fingerprint(model),
    }
    assert len(names) == 4
    assert model_fingerprint(model, 1) in names


def test_the_fingerprint_of_a_split_model_is_that_of_all_parts(tmp_path: Path) -> None:
    first, second = (tmp_path / f"m-0000{n}-of-00002.gguf" for n in (1, 2))
    first.write_bytes(b"GGUF one")
    names = {model_fingerprint(first)}
    for content in (b"GGUF two", b"GGUF too"):
        second.write_bytes(content)
        names.add(model_fingerprint(first))
    assert len(names) == 3
    assert model_fingerprint(second) not in names
