"""Counters of energy: RAPL of the processor, NVML of NVIDIA's cards.

Both count what the whole package or card takes, other programs and idle time included.

Source: Documentation/power/powercap/powercap.rst of Linux; NVML API Reference Guide, nvmlDeviceGetTotalEnergyConsumption.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import structlog
import trio

log = structlog.get_logger("uma_trio.processes.energy")

POWERCAP: Final = Path("/sys/class/powercap")
"""Where Linux has the counters of RAPL."""

NVML: Final = "pynvml"
"""The module of the package nvidia-ml-py."""


@attrs.define
class RaplZone:
    """A package of the processor.

    The counter begins again at 0 after ``range_uj`` microjoules.
    """

    _file: Path
    _range_uj: int
    _last_uj: int
    _total_uj: int = 0

    @classmethod
    def open(cls, folder: Path) -> RaplZone | None:
        """The zone of ``folder``; ``None`` if it is no package.

        Raises:
            OSError: its counter cannot be read.
        """
        if not (folder / "name").read_text().startswith("package"):
            return None
        file = folder / "energy_uj"
        return cls(file, int((folder / "max_energy_range_uj").read_text()), int(file.read_text()))

    def joules(self) -> float:
        """Since it was opened.

        Raises:
            OSError: the counter cannot be read.
        """
        now = int(self._file.read_text())
        self._total_uj += (now - self._last_uj) % (self._range_uj + 1)
        self._last_uj = now
        return self._total_uj / 1e6


@attrs.define
class NvidiaCard:
    """A card of NVIDIA, from Volta on."""

    _read: Callable[[], int]
    """Millijoules since the driver was loaded."""
    _first_mj: int

    def joules(self) -> float:
        """Since it was opened.

        Raises:
            OSError: the counter cannot be read.
        """
        return (self._read() - self._first_mj) / 1e3


@attrs.frozen
class EnergyMeter:
    """The counters that this process may read."""

    counters: Sequence[RaplZone | NvidiaCard]
    refused: str = ""
    """Why some cannot be read; empty if all can."""

    @property
    def names(self) -> str:
        """What is counted, for people."""
        kinds = [type(counter) for counter in self.counters]
        cpus, cards = kinds.count(RaplZone), kinds.count(NvidiaCard)
        parts = [f"{cpus} processor packages (RAPL)"] * bool(cpus) + [f"{cards} cards (NVML)"] * bool(cards)
        return ", ".join(parts)

    def joules(self) -> float:
        """What all have counted since they were opened.

        Raises:
            OSError: a counter cannot be read any more.
        """
        return sum([counter.joules() for counter in self.counters])

    async def read(self) -> float:
        """As ``joules``, in a thread: NVML takes up to 10 ms.

        Raises:
            OSError: a counter cannot be read any more.
        """
        return await trio.to_thread.run_sync(self.joules)


@functools.cache
def meter_of_this_machine() -> EnergyMeter | None:
    """The counters of this machine, for all models; ``None`` if there are none.  The log says once which there are."""
    meter = open_meter()
    if meter.counters:
        log.info("energy", counters=meter.names)
    else:
        log.info(
            "energy", counters="none", reason=meter.refused or "this machine has no counters that a program can read"
        )
    return meter if meter.counters else None


def open_meter(powercap: Path = POWERCAP, nvml: str = NVML) -> EnergyMeter:
    """Find the counters of this machine; there may be none.  Takes some milliseconds."""
    counters: list[RaplZone | NvidiaCard] = []
    refused = []
    for folder in sorted(powercap.glob("intel-rapl:*")):
        if folder.name.count(":") > 1:  # a part of a package
            continue
        try:
            zone = RaplZone.open(folder)
        except OSError as error:
            refused.append(f"{folder / 'energy_uj'}: {error.strerror}")
            continue
        if zone is not None:
            counters.append(zone)
    counters += _cards(nvml)
    return EnergyMeter(tuple(counters), "; ".join(refused))


def _cards(nvml: str) -> list[NvidiaCard]:
    """The cards that count energy; none without the library."""
    try:
        library: Any = importlib.import_module(nvml)
    except ImportError:
        return []
    try:
        library.nvmlInit()
    except library.NVMLError as error:
        log.info("NVML does not answer", reason=str(error))
        return []
    cards = []
    for index in range(library.nvmlDeviceGetCount()):
        card = library.nvmlDeviceGetHandleByIndex(index)

        def read(card: Any = card) -> int:
            try:
                return int(library.nvmlDeviceGetTotalEnergyConsumption(card))
            except library.NVMLError as error:
                raise OSError(f"NVML: {error}") from error

        try:
            cards.append(NvidiaCard(read, read()))
        except OSError as error:  # an old card, which does not count
            log.info("a card does not count energy", card=index, reason=str(error))
    return cards
