"""The hub of the tests behaves as the real one: Hugging Face's own library downloads from it, and we read its cache."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path

import pytest

from tests.support.hub_server import COMMIT, FakeHub, git_sha1
from tests.support.model_home import Home

huggingface_hub = pytest.importorskip("huggingface_hub", reason="pip install -e .[dev] brings huggingface_hub")
constants = importlib.import_module("huggingface_hub.constants")
errors = importlib.import_module("huggingface_hub.errors")

NAME = "acme/Tiny-GGUF"
FILE = "Tiny-Q8_0.gguf"


@pytest.fixture(autouse=True)
def no_xet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The protocol of chunks is another one; the hub of the tests does not offer it."""
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)


def test_their_library_reads_what_our_hub_says(hub: FakeHub, model: bytes) -> None:
    hub.add(NAME, {"README.md": b"# Tiny", FILE: model}, in_git=("README.md",))
    info = huggingface_hub.HfApi(endpoint=hub.url, token=False).model_info(NAME, files_metadata=True)
    assert info.sha == COMMIT
    found = {each.rfilename: each for each in info.siblings}
    assert (found[FILE].size, found[FILE].lfs.size) == (len(model), len(model))
    assert len(found[FILE].lfs.sha256) == 64
    assert (found["README.md"].lfs, found["README.md"].blob_id) == (None, git_sha1(b"# Tiny"))


@pytest.mark.parametrize(
    ("options", "error"), [({"is_private": True}, "RepositoryNotFoundError"), ({"is_gated": True}, "GatedRepoError")]
)
def test_their_library_understands_our_refusals(
    hub: FakeHub, model: bytes, tmp_path: Path, options: dict[str, bool], error: str
) -> None:
    hub.add(NAME, {FILE: model}, **options)
    with pytest.raises(getattr(errors, error)):
        huggingface_hub.hf_hub_download(NAME, FILE, endpoint=hub.url, cache_dir=tmp_path, token=False)
    path = huggingface_hub.hf_hub_download(NAME, FILE, endpoint=hub.url, cache_dir=tmp_path, token="hf_secret")
    assert Path(path).read_bytes() == model


def test_what_their_library_downloaded_is_used_where_it_is(hub: FakeHub, home: Home, model: bytes) -> None:
    hub.add(NAME, {FILE: model})
    cache = home.folder / ".cache" / "huggingface" / "hub"
    path = huggingface_hub.hf_hub_download(NAME, FILE, endpoint=hub.url, cache_dir=cache, token=False)
    n_requests = len(hub.file_requests())
    (listed,) = home.listed()
    assert (listed["name"], listed["origin"], listed["files"]) == (f"{NAME}:Q8_0", "Hugging Face", [path])
    pulled = json.loads(home.run("pull", "--json", NAME).stdout)
    assert (pulled["path"], pulled["origin"]) == (path, "Hugging Face")
    assert len(hub.file_requests()) == n_requests, "nothing was downloaded"
    assert home.files() == []
    refused = home.run("models", "remove", "--yes", NAME)
    assert refused.returncode == 1
    assert "belongs to Hugging Face; remove it with: hf cache rm" in refused.stderr
    os.unlink(os.path.realpath(path))
    assert home.listed() == [], "a link to nowhere is not a model"
