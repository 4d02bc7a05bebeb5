"""The memory that a process may use: the least of the machine's, its cgroups' and its own limits."""

from __future__ import annotations

import mmap
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.support.cases import all_cases
from uma_trio.processes import machine

MIB = 1 << 20
Group = Callable[..., None]


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Group:
    """Write files of a cgroup below a root of their own."""
    monkeypatch.setattr(machine, "CGROUPS", tmp_path)
    monkeypatch.setattr(machine, "OF_THIS_PROCESS", tmp_path / "self")

    def write(folder: str, **files: str) -> None:
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (tmp_path / folder / name.replace("__", ".")).write_text(content)

    return write


def in_cgroup(tmp_path: Path, line: str) -> None:
    (tmp_path / "self").write_text(line + "\n")


def test_version_2_takes_the_tightest_limit_on_the_way_to_the_root(group: Group, tmp_path: Path) -> None:
    in_cgroup(tmp_path, "0::/slice/service")
    group("slice/service", memory__max="max\n", memory__high="max\n", memory__current=f"{90 * MIB}\n")
    group("slice", memory__max=f"{100 * MIB}\n", memory__high="max\n", memory__current=f"{90 * MIB}\n")
    group("slice", memory__stat=f"anon {60 * MIB}\ninactive_file {20 * MIB}\nactive_file 9\n")
    assert machine.free_memory_bytes() == 30 * MIB, "pages of files that can be dropped are free"
    assert machine.machine_memory_bytes() == 100 * MIB
    group("slice/service", memory__high=f"{95 * MIB}\n")
    assert machine.free_memory_bytes() == 5 * MIB, "from there on the kernel slows the group down"


def test_version_1(group: Group, tmp_path: Path) -> None:
    in_cgroup(tmp_path, "5:devices:/\n4:cpu,memory:/box\n1:name=systemd:/\n0::/")
    group("memory", memory__limit_in_bytes="9223372036854771712", memory__usage_in_bytes="77777777")
    group("memory/box", memory__limit_in_bytes=str(64 * MIB), memory__usage_in_bytes=str(48 * MIB))
    group("memory/box", memory__stat=f"total_inactive_file {8 * MIB}\n")
    assert machine.free_memory_bytes(swap=False) == 24 * MIB


@pytest.mark.parametrize("line", ["0::/nowhere", "4:memory:/nowhere", ""])
def test_without_a_limit_the_machines_memory_counts(group: Group, tmp_path: Path, line: str) -> None:
    in_cgroup(tmp_path, line)
    assert machine.machine_memory_bytes() == psutil.virtual_memory().total
    assert machine.free_memory_bytes(swap=False) > 0


def test_a_group_that_is_over_its_limit_has_nothing_free(group: Group, tmp_path: Path) -> None:
    in_cgroup(tmp_path, "0::/")
    group(".", memory__max=str(MIB), memory__current=str(2 * MIB))
    assert machine.free_memory_bytes() == 0


@all_cases("name", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_ulimit_counts_what_the_process_has_already(name: str) -> None:
    code = (
        "import psutil, resource\n"
        "from uma_trio.processes import machine\n"
        "used = psutil.Process().memory_info()\n"
        f"used = used.vms if '{name}' == 'RLIMIT_AS' else used.data\n"
        f"resource.setrlimit(resource.{name}, (used + (100 << 20),) * 2)\n"
        "print(machine.free_memory_bytes())\n"
    )
    assert hasattr(resource, name)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert 50 * MIB < int(ended.stdout) <= 100 * MIB


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what no file backs")
def test_anonymous_memory_grows_with_what_is_written() -> None:
    before = machine.anonymous_bytes()
    with mmap.mmap(-1, 32 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as held:
        for at in range(0, len(held), 4096):
            held[at] = 1
        assert machine.anonymous_bytes() - before >= 24 * MIB
