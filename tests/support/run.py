"""One run of the test suite: its temporary folder, and who may use the machine."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

RUN_VARIABLE = "PYTEST_UMA_TRIO_RUN"
"""Environment variable with the folder of the run; ``tests/conftest.py`` sets it."""


def run_folder() -> Path:
    """A folder that all processes of the run share, and that is removed at its end."""
    return Path(os.environ[RUN_VARIABLE])


@contextlib.contextmanager
def locked(name: str, *, shared: bool = False) -> Iterator[None]:
    """Hold a lock of the run.

    Args:
        name: of the lock.
        shared: others may hold it as well, if they ask for it in the same way.
    """
    with (run_folder() / f"{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def machine(*, alone: bool) -> Iterator[None]:
    """Use the machine together with the tests of other processes, or alone."""
    with contextlib.ExitStack() as stack:
        with locked("queue"):  # first come, first served: shared holders do not overtake one that waits to be alone
            stack.enter_context(locked("machine", shared=not alone))
        yield
