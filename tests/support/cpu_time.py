"""CPU time by module, at the end of a run: of the tests, and of all processes that they have started.

On a machine that is busy it says more than durations do.  What a daemon does that several modules share counts in the
module that asks it.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator

import psutil
import pytest

SHOWN = 15
LEAST_S = 60.0
"""A run that takes less shows nothing."""
NAME = "cpu_s"


def _used_s() -> float:
    """CPU time of this process and of all that it has started, those that run included."""
    me = psutil.Process()
    found = 0.0
    for process in (me, *me.children(recursive=True)):
        with contextlib.suppress(psutil.Error):  # it has ended
            found += sum(process.cpu_times()[:4])
    return found


class CpuTime:
    """A plugin of each process of the run."""

    def __init__(self) -> None:
        self._before_s = 0.0
        self._ends = False
        """Whether the test that runs is the last one of its module in this process."""
        self._modules: Counter[str] = Counter()

    def pytest_collection_finish(self) -> None:
        """Begin after the imports of all tests."""
        self._before_s = _used_s()

    def pytest_runtest_teardown(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        self._ends = nextitem is None or nextitem.path != item.path

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Iterator[None]:
        """Add what a module has used to its last report, which xdist sends to the first process."""
        report = yield
        if call.when == "teardown" and self._ends:
            now_s = _used_s()
            report.user_properties.append((NAME, now_s - self._before_s))
            self._before_s = now_s
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._modules[report.nodeid.partition("::")[0]] += sum(s for name, s in report.user_properties if name == NAME)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Show the modules that used most."""
        if (all_s := self._modules.total()) < LEAST_S:
            return
        folders: Counter[str] = Counter()
        for module, used_s in self._modules.items():
            folders[os.path.dirname(module)] += used_s
        terminalreporter.section(f"{all_s:.0f} s of CPU time")
        for name, used_s in (*folders.most_common(), *self._modules.most_common(SHOWN)):
            terminalreporter.write_line(f"{used_s:7.1f} s {name}")
