"""Fixtures of the tests with libllama and the embedded model.  Tests are skipped where one of them is missing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.real_daemon import Daemon, missing, real_daemon


@pytest.fixture(scope="session")
def library() -> None:
    """Skip the test if the library or the embedded model is missing."""
    if (reason := missing()) is not None:
        pytest.skip(reason)


@pytest.fixture(scope="session")
def daemon(library: None) -> Iterator[Daemon]:
    """A daemon with the embedded model, shared by all tests of a process; a test must not leave anything behind in it."""
    with real_daemon("--parallel", "64", "--ctx", "262144") as found:
        yield found
