"""A hub on this machine, and an environment in which nothing of the user's is found."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.bench_scripts import bench_script
from tests.support.hub_server import FakeHub, fake_hub
from tests.support.model_home import Home, make_home
from uma_trio.models.packaged import EMBEDDED


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with fake_hub() as found:
        yield found


@pytest.fixture(scope="session")
def model() -> bytes:
    """A model file that passes every check."""
    return EMBEDDED.read_bytes()


@pytest.fixture(scope="session")
def projector(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A projector of the model."""
    script, path = bench_script("make_projector"), tmp_path_factory.mktemp("projector") / "made.gguf"
    script.make_projector(path, EMBEDDED, script.SHAPES["tiny"])
    return path.read_bytes()


@pytest.fixture
def home(tmp_path: Path, hub: FakeHub) -> Home:
    return make_home(tmp_path, hub.url)
