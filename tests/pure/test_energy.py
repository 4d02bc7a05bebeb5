"""Counters of energy in a faked tree of sysfs, and the pauses of a power limit."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from tests.support.cases import all_cases
from uma_trio.config.power import PowerLimit, parse_power_limit
from uma_trio.config.refusal import ConfigError
from uma_trio.daemon.policy.rest import MIN_SHARE, Rest, rest_of
from uma_trio.processes.energy import open_meter

NO_LIBRARY = "there_is_no_such_module"


def zone(root: Path, folder: str, name: str, uj: int, range_uj: int = 1_000_000_000) -> Path:
    path = root / folder
    path.mkdir()
    (path / "name").write_text(f"{name}\n")
    (path / "max_energy_range_uj").write_text(f"{range_uj}\n")
    (path / "energy_uj").write_text(f"{uj}\n")
    return path / "energy_uj"


def test_packages_are_added_and_their_parts_are_not(tmp_path: Path) -> None:
    first, second = zone(tmp_path, "intel-rapl:0", "package-0", 500), zone(tmp_path, "intel-rapl:1", "package-1", 10)
    zone(tmp_path, "intel-rapl:0:0", "core", 7)
    zone(tmp_path, "intel-rapl:2", "psys", 9)
    meter = open_meter(tmp_path, NO_LIBRARY)
    assert meter.names == "2 processor packages (RAPL)"
    assert meter.joules() == 0
    first.write_text("2000500")
    second.write_text("1000010")
    assert meter.joules() == pytest.approx(3.0)


def test_a_counter_that_begins_again_goes_on(tmp_path: Path) -> None:
    counter = zone(tmp_path, "intel-rapl:0", "package-0", 900_000, range_uj=999_999)
    meter = open_meter(tmp_path, NO_LIBRARY)
    counter.write_text("100000")
    assert meter.joules() == pytest.approx(0.2)
    counter.write_text("50000")
    assert meter.joules() == pytest.approx(1.15)


def test_without_counters_there_are_none_and_why(tmp_path: Path) -> None:
    assert not open_meter(tmp_path / "missing", NO_LIBRARY).counters
    counter = zone(tmp_path, "intel-rapl:0", "package-0", 5)
    counter.unlink()
    counter.mkdir()  # cannot be read, also by root
    found = open_meter(tmp_path, NO_LIBRARY)
    assert (found.counters, "energy_uj" in found.refused) == ((), True)


class FakeNvml(types.ModuleType):
    """Two cards, of which the second one does not count."""

    class NVMLError(Exception):
        pass

    millijoules = 7000

    def energy(self, card: int) -> int:
        if card:
            raise self.NVMLError("Not Supported")
        return self.millijoules


def test_cards_count_if_they_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeNvml("fake_nvml")
    names = {"Init": lambda: None, "DeviceGetCount": lambda: 2, "DeviceGetHandleByIndex": lambda index: index}
    for name, function in {**names, "DeviceGetTotalEnergyConsumption": library.energy}.items():
        setattr(library, f"nvml{name}", function)
    monkeypatch.setitem(sys.modules, "fake_nvml", library)
    meter = open_meter(tmp_path, "fake_nvml")
    assert (meter.names, meter.joules()) == ("1 cards (NVML)", 0)
    library.millijoules = 9500
    assert meter.joules() == pytest.approx(2.5)


@all_cases(
    ("text", "limit"),
    [
        ("60%", PowerLimit(share=0.6)),
        ("100 %", PowerLimit(share=1.0)),
        ("40W", PowerLimit(watts=40)),
        ("7.5 w", PowerLimit(watts=7.5)),
    ],
)
def test_limits(text: str, limit: PowerLimit) -> None:
    assert parse_power_limit(text) == limit


@all_cases("text", ["60", "0%", "101%", "0W", "-3W", "W", "1e3W", "40 J", ""])
def test_what_is_no_limit(text: str) -> None:
    with pytest.raises(ConfigError, match="power_limit"):
        parse_power_limit(text)


def test_a_share_is_kept_in_each_tick() -> None:
    rest = Rest(PowerLimit(share=0.6))
    assert rest.after_tick(0.3, 5.0, 1e9) == pytest.approx(0.2)


def run(watts: float, *, busy_w: float, idle_w: float, seconds: float = 60) -> tuple[float, float]:
    """Mean power and the share of the time in which a device computes, in ticks of 100 ms."""
    rest, now, joules, busy = Rest(PowerLimit(watts=watts)), 0.0, 0.0, 0.0
    pause = used = 0.0
    while now < seconds:
        used = 0.1 * busy_w + pause * idle_w
        elapsed = 0.1 + pause
        now, joules, busy = now + elapsed, joules + used, busy + 0.1
        pause = rest.after_tick(0.1, now, used / elapsed)
    return joules / now, busy / now


def test_a_power_is_kept_as_a_mean() -> None:
    power, share = run(40, busy_w=90, idle_w=10)
    assert power == pytest.approx(40, rel=0.05)
    assert share == pytest.approx(3 / 8, rel=0.05)
    assert run(120, busy_w=90, idle_w=10) == (pytest.approx(90), pytest.approx(1.0)), "nobody rests below the limit"


def test_a_device_that_needs_more_even_at_rest_goes_on_slowly() -> None:
    _, share = run(5, busy_w=90, idle_w=10)
    assert share == pytest.approx(MIN_SHARE, rel=0.1)


def test_a_power_that_nobody_counts_is_no_limit() -> None:
    assert Rest(PowerLimit(watts=40)).after_tick(0.1, 0.1, None) == 0, "the counter has gone"
    assert rest_of("40W", counts_energy=False) is None
    assert rest_of("40W", counts_energy=True) is not None
    assert rest_of("50%", counts_energy=False) is not None
    assert rest_of(None, counts_energy=True) is None
