"""Settings of the whole test run: hypothesis, one temporary folder, and processes that a test leaves behind.

- ``--profile`` says how much is tried (``tests/support/profile.py``).  The quick profile tries the same in every run, and
  so does the whole one; the thorough one tries many new examples.
- trio runs tasks that are ready together in a random order.  With the thorough profile it is left to chance;
  otherwise a test gets the same order in every run, so that one that fails does so again.
- Caches and states go to a folder of this run, so no test sees the user's files or those of an earlier run.  Its processes
  share the cache: a daemon starts with what one of another process has measured.
- Where Python must not write bytecode next to the source, it goes to ``build``: hundreds of child processes start, and
  pytest compiles each test of each run otherwise.
- Daemons choose the layout of their KV cache by rule; a measured choice would depend on the load of the machine.
- Daemons compute with one thread.  Several would meet at barriers, and with other tests on their cores they would wait
  there most of the time.
- HTTP clients trust one authority: to read the usual hundreds takes longer than a request.
- numpy starts no threads: they would spin, in each of the many processes that import it.
- Controllers may take ten seconds.  The usual limits are short for a machine that is busy with tests.
- Tests run in one process more than there are cores (pytest-xdist), because they wait for a quarter of their time: for a
  timeout, the end of a process, or the disk.  The tests of a module run in one process, in order, so that they share
  its fixtures.  Modules run in the order of their paths, so the last ones, of ``tests/store``, are short, and no
  process waits long for the others.
- With a library for GPUs the tests use the first GPU, and those with the marker ``cpu`` are skipped (``tests/support/gpu.py``).
- A test that hangs fails after ``timeout`` seconds of ``pyproject.toml``.
- Every process of the run has ``RUN_VARIABLE`` in its environment.  A process that is still there at the end was leaked
  by a test: it is killed, and the run fails.
"""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
import trio

from tests.support import gpu, profile
from tests.support.cpu_time import CpuTime
from tests.support.forked import TITLE, Forked, can_fork
from tests.support.rewriting import rewrite_share
from tests.support.run import RUN_VARIABLE, SETTINGS_OF_DAEMONS, one_authority, run_folder

EXIT_S = 60.0
"""How long processes of the tests may take to end after the last test."""

GPU_WORKERS = 4
"""Most processes of a run whose library has a GPU, unless ``-n`` says another number."""

is_worker = "PYTEST_XDIST_WORKER" in os.environ
if not is_worker:
    os.environ[RUN_VARIABLE] = tempfile.mkdtemp(prefix="uma-trio-tests-")
    atexit.register(shutil.rmtree, os.environ[RUN_VARIABLE], ignore_errors=True)
    os.environ.setdefault("SSL_CERT_FILE", str(one_authority()))
os.environ["XDG_CACHE_HOME"] = str(run_folder() / "cache")
os.environ["XDG_STATE_HOME"] = str(run_folder() / os.environ.get("PYTEST_XDIST_WORKER", "main") / "state")
os.environ.update(SETTINGS_OF_DAEMONS)
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
    sys.dont_write_bytecode = False
    sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = str(Path(__file__).parents[1] / "build/bytecode")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--profile", choices=profile.PROFILES, default="quick", help="how much the tests try")


def pytest_configure(config: pytest.Config) -> None:
    profile.choose(config.getoption("--profile"))
    config.pluginmanager.register(CpuTime())


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """How many processes ``-n auto`` starts: with a GPU few, because each has engines that take of its memory."""
    if gpu.gpu():
        return min(GPU_WORKERS, os.cpu_count() or 1)
    return (psutil.cpu_count(logical=False) or os.cpu_count() or 1) + 1


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Begin with the own share of a work that all processes of the run have.

    The garbage collector would look at the thousands of tests again and again: they live to the end.
    """
    if is_worker:
        gc.disable()
        name, count = (os.environ[f"PYTEST_XDIST_WORKER{each}"] for each in ("", "_COUNT"))
        rewrite_share(session.config, int(name.removeprefix("gw")), int(count))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what the quick profile does, and skip what is about the CPU if the library has a GPU."""
    for each in items:
        mark = each.get_closest_marker("cpu")
        if mark is not None and gpu.gpu():
            each.add_marker(pytest.mark.skip(reason=f"for a CPU, and the library uses {gpu.gpu()}: {mark.args[0]}"))
    if profile.is_quick():
        config.hook.pytest_deselected(items=[each for each in items if each.get_closest_marker("thorough")])
        items[:] = [each for each in items if not each.get_closest_marker("thorough")]


def pytest_collection_finish() -> None:
    """Let the garbage collector look at what comes after the tests alone."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def same_order_of_tasks(request: pytest.FixtureRequest) -> None:
    """Seed what trio shuffles with, as hypothesis does: there is no public way to it."""
    if not profile.is_thorough():
        trio._core._run._r.seed(request.node.nodeid)


@pytest.fixture
def forked_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines and runtimes of controllers that a test starts without a daemon begin in forks, as a daemon's do."""
    if can_fork({}):
        monkeypatch.setattr("subprocess.Popen", Forked)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail if processes of this run are left."""
    if is_worker:
        return
    _, left = psutil.wait_procs(_processes_of_this_run(), timeout=EXIT_S)
    for process in left:
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.write_line(f"a test left a process behind: {process}", red=True)
        process.kill()
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _processes_of_this_run() -> list[psutil.Process]:
    """All but this one, children in a sandbox, of multiprocessing, and what forks commands: they end with who started them, perhaps this one."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(RUN_VARIABLE) != str(run_folder()) or process.pid == os.getpid():
                continue
            line = " ".join(process.cmdline())
            if not any(
                word in line for word in ("template_worker.py", "uma_trio.grammar", "from multiprocessing.", TITLE)
            ):
                found.append(process)
        except psutil.Error:  # another user's, or it has ended
            continue
    return found
