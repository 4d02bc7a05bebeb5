"""Runs the tests in forks of the process that has collected them: ``pytest -n 3`` has three.

To import all tests takes seven seconds of CPU time, and more in a new checkout: so it happens once.

The tests of a module run in one process, in order, so that they share its fixtures.  A process that has nothing left to
do takes the next module, in the order of their paths.  Reports go to the first process, where all plugins see them.  A test
that ends its process has failed; another process runs what is left of the module.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import itertools
import os
import signal
import sys
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NoReturn

import attrs
import pytest
from _pytest.runner import CallInfo

PR_SET_PDEATHSIG = 1

Module = Sequence[pytest.Item]


@attrs.define
class Worker:
    """A fork, as the first process sees it."""

    pid: int
    connection: Connection
    left: deque[pytest.Item]
    """The tests that it has got and that have not ended."""


class Workers:
    """A plugin.

    Args:
        count: how many forks.
        begin: what each of them does first; it gets the number of the fork.
    """

    def __init__(self, count: int, begin: Callable[[int], None]) -> None:
        self._count = count
        self._begin = begin
        self._n_forked = 0
        self._workers: dict[Connection, Worker] = {}
        self._modules: deque[Module] = deque()
        """Those that no process has got."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        self._modules.extend(tuple(items) for _, items in itertools.groupby(session.items, lambda item: item.path))
        if len(self._modules) < 2 or session.testsfailed or session.config.option.collectonly:
            return None
        if (reporter := session.config.pluginmanager.get_plugin("terminalreporter")) is not None:
            reporter.showfspath = False
        session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        try:
            for _ in range(min(self._count, len(self._modules))):
                self._fork(session)
            while self._workers:
                for connection in wait([*self._workers]):
                    assert isinstance(connection, Connection)
                    self._receive(session, self._workers[connection])
                    if session.shouldfail:
                        raise session.Failed(session.shouldfail)
                    if session.shouldstop:
                        raise session.Interrupted(session.shouldstop)
        finally:
            for worker in self._workers.values():
                os.kill(worker.pid, signal.SIGKILL)
                os.waitpid(worker.pid, 0)
        return True

    # -- the first process ----------------------------------------------------------------------------

    def _fork(self, session: pytest.Session) -> None:
        ours, theirs = Pipe()
        number = self._n_forked
        self._n_forked += 1
        sys.stdout.flush()
        sys.stderr.flush()
        if not (pid := os.fork()):
            ours.close()
            self._work(session, number, theirs)
        theirs.close()
        self._workers[ours] = worker = Worker(pid, ours, deque())
        self._send_module(session, worker)

    def _send_module(self, session: pytest.Session, worker: Worker) -> None:
        module = self._modules.popleft() if self._modules else ()
        worker.left.extend(module)
        first = session.items.index(module[0]) if module else 0
        worker.connection.send((first, first + len(module)))

    def _receive(self, session: pytest.Session, worker: Worker) -> None:
        hook = session.config.hook
        name = None
        with contextlib.suppress(EOFError, ConnectionResetError):
            name, data = worker.connection.recv()
        if name is None:
            self._end(session, worker)
        elif name == "next":
            self._send_module(session, worker)
        elif name == "report":
            report = hook.pytest_report_from_serializable(config=session.config, data=data)
            hook.pytest_runtest_logreport(report=report)
        else:
            if name == "pytest_runtest_logfinish":
                worker.left.popleft()
            getattr(hook, name)(**data)

    def _end(self, session: pytest.Session, worker: Worker) -> None:
        """A worker has ended.  If it had a test to run, that has failed, and another worker takes the rest."""
        del self._workers[worker.connection]
        worker.connection.close()
        _, status = os.waitpid(worker.pid, 0)
        if not worker.left:
            return
        item = worker.left.popleft()
        message = f"its process ended with {os.waitstatus_to_exitcode(status)}"
        call: CallInfo[None] = CallInfo.from_call(lambda: pytest.fail(message, pytrace=False), "call")
        session.config.hook.pytest_runtest_logreport(report=pytest.TestReport.from_item_and_call(item, call))
        rest = [tuple(items) for _, items in itertools.groupby(worker.left, lambda item: item.path)]
        self._modules.extendleft(reversed(rest))
        if self._modules:
            self._fork(session)

    # -- a fork ---------------------------------------------------------------------------------------

    def _work(self, session: pytest.Session, number: int, connection: Connection) -> NoReturn:
        code = 1
        try:
            self._become_worker(session, number, connection)
            self._run_modules(session, connection)
            code = 0
        except (KeyboardInterrupt, pytest.exit.Exception):
            """The first process got it too."""
        except BaseException:  # noqa: BLE001  (it is printed)
            traceback.print_exc()
        finally:
            with contextlib.suppress(BaseException):  # what is left after an interrupt
                session._setupstate.teardown_exact(None)
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _become_worker(self, session: pytest.Session, number: int, connection: Connection) -> None:
        atexit._clear()
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        for worker in self._workers.values():
            worker.connection.close()
        plugins = session.config.pluginmanager
        if (reporter := plugins.get_plugin("terminalreporter")) is not None:
            reporter._tw._file = open(os.devnull, "w")  # noqa: SIM115
        capture = plugins.get_plugin("capturemanager")
        capture.stop_global_capturing()  # of files that all processes would write
        capture.start_global_capturing()
        capture.suspend_global_capture()
        factory = session.config._tmp_path_factory  # type: ignore[attr-defined]
        factory._basetemp = factory.getbasetemp() / f"worker-{number}"
        factory._basetemp.mkdir(mode=0o700)
        plugins.register(Sender(session.config, connection))
        self._begin(number)

    def _run_modules(self, session: pytest.Session, connection: Connection) -> None:
        protocol = session.config.hook.pytest_runtest_protocol
        first, end = connection.recv()
        while first < end:
            module = session.items[first:end]
            for item, following in itertools.pairwise(module):
                protocol(item=item, nextitem=following)
            connection.send(
                ("next", None)
            )  # now, because the last test ends the fixtures that the next one does not use
            first, end = connection.recv()
            protocol(item=module[-1], nextitem=session.items[first] if first < end else None)


class Sender:
    """A plugin of a fork, which sends what the first process is to see."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config = config
        self._connection = connection

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        self._connection.send(("pytest_runtest_logstart", {"nodeid": nodeid, "location": location}))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._connection.send(("report", data))

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        self._connection.send(("pytest_runtest_logfinish", {"nodeid": nodeid, "location": location}))
