"""One run of the test suite: what its processes share."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import certifi

RUN_VARIABLE = "PYTEST_UMA_TRIO_RUN"
"""Environment variable with the folder of the run; ``tests/conftest.py`` sets it."""


SETTINGS_OF_DAEMONS = {
    "UMA_LAYOUT_TRIAL_S": "0",
    "UMA_THREADS": "1",
    "UMA_AICI_STEP_MS": "10000",
    "UMA_AICI_INIT_MS": "10000",
}
"""Settings of every daemon of the run, as variables: see ``tests/conftest.py``."""


def run_folder() -> Path:
    """A folder that all processes of the run share, and that is removed at its end."""
    return Path(os.environ[RUN_VARIABLE])


def one_authority() -> Path:
    """A file with the first certificate of the usual ones."""
    end = "-----END CERTIFICATE-----\n"
    usual = Path(certifi.where()).read_text()
    file = run_folder() / "authority.pem"
    file.write_text(usual[usual.index("-----BEGIN") : usual.index(end)] + end)
    return file


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """Hold a lock of the run."""
    with (run_folder() / f"{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
