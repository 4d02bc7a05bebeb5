"""What these tests need: libllama and a model.  Without them they skip, and say what would build them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.real_daemon import Daemon, missing, real_daemon


@pytest.fixture(scope="session")
def library() -> None:
    """Skips where there is no library or no embedded model."""
    if (reason := missing()) is not None:
        pytest.skip(reason)


@pytest.fixture(scope="session")
def daemon(library: None) -> Iterator[Daemon]:
    """One daemon with the embedded model for all tests that leave it as they found it."""
    with real_daemon("--parallel", "64", "--ctx", "262144") as found:
        yield found
