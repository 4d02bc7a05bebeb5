"""Settings of the whole test run: hypothesis, one temporary folder, and processes that a test leaves behind.

- Hypothesis tries the same examples in every run, without deadlines.  ``UMA_TEST_EXPLORE=1`` tries many new ones.
- trio runs tasks that are ready together in a random order.  A test gets the same order in every run, so that one that
  fails does so again; ``UMA_TEST_EXPLORE=1`` leaves it to chance.
- Caches and states go to a folder of this run, so no test sees the user's files or those of an earlier run.
- Hundreds of child processes start: where Python must not write bytecode next to the source, it goes to that folder too.
- Daemons choose the layout of their KV cache by rule; a measured choice would depend on the load of the machine.
- Daemons compute with one thread.  Several would meet at barriers, and with other tests on their cores they would wait
  there most of the time.
- numpy starts no threads: they would spin, in each of the many processes that import it.
- Controllers may take ten seconds.  The usual limits are short for a machine that is busy with tests.
- Tests run in a process for each core (pytest-xdist).  The tests of a module run in one process, in order, so that they share
  its fixtures.  Modules run in the order of their paths, so the last ones, of ``tests/store``, are short, and no
  process waits long for the others.
- A test that hangs fails after ``timeout`` seconds of ``pyproject.toml``.
- Every process of the run has ``RUN_VARIABLE`` in its environment.  A process that is still there at the end was leaked
  by a test: it is killed, and the run fails.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

import psutil
import pytest
import trio
from hypothesis import settings

from tests.support.run import RUN_VARIABLE, SETTINGS_OF_DAEMONS, run_folder

EXIT_S = 60.0
"""How long processes of the tests may take to end after the last test."""

settings.register_profile("same", derandomize=True, deadline=None, max_examples=20)
settings.register_profile("explore", derandomize=False, deadline=None, max_examples=2000, print_blob=True)
settings.load_profile("explore" if os.environ.get("UMA_TEST_EXPLORE") else "same")

is_worker = "PYTEST_XDIST_WORKER" in os.environ
if not is_worker:
    os.environ[RUN_VARIABLE] = tempfile.mkdtemp(prefix="uma-trio-tests-")
    atexit.register(shutil.rmtree, os.environ[RUN_VARIABLE], ignore_errors=True)
for variable in ("XDG_CACHE_HOME", "XDG_STATE_HOME"):
    os.environ[variable] = str(run_folder() / os.environ.get("PYTEST_XDIST_WORKER", "main") / variable)
os.environ.update(SETTINGS_OF_DAEMONS)
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
    os.environ["PYTHONPYCACHEPREFIX"] = str(run_folder() / "bytecode")


@pytest.fixture(autouse=True)
def same_order_of_tasks(request: pytest.FixtureRequest) -> None:
    """Seed what trio shuffles with, as hypothesis does: there is no public way to it."""
    if "UMA_TEST_EXPLORE" not in os.environ:
        trio._core._run._r.seed(request.node.nodeid)


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
    """All but this one, children in a sandbox, and those of multiprocessing: they end with who started them, perhaps this one."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(RUN_VARIABLE) != str(run_folder()) or process.pid == os.getpid():
                continue
            line = " ".join(process.cmdline())
            if not any(word in line for word in ("template_worker.py", "uma_trio.grammar", "from multiprocessing.")):
                found.append(process)
        except psutil.Error:  # another user's, or it has ended
            continue
    return found
