"""What a model file recommends for sampling, from the file to the text."""

from __future__ import annotations

import struct

import pytest

from tests.support.gguf_files import F32, U32, pair, with_pairs
from tests.support.real_daemon import real_daemon
from uma_trio.models.packaged import EMBEDDED

STORY = {"prompt": "Once upon a time", "max_tokens": 40, "seed": 5}


@pytest.fixture
def recommending(library, tmp_path):
    """The embedded model with a recommendation of its own."""
    path = tmp_path / "embedded.gguf"
    path.write_bytes(
        with_pairs(
            EMBEDDED.read_bytes(),
            pair("general.sampling.temp", F32, struct.pack("<f", 8.0)),
            pair("general.sampling.top_k", U32, struct.pack("<I", 30)),
            pair("general.sampling.top_p", F32, struct.pack("<f", 7.0)),
        )
    )
    return path


@pytest.mark.thorough
def test_a_model_that_recommends_nothing_is_greedy(library, tmp_path):
    with real_daemon(folder=tmp_path) as daemon:
        assert daemon.ask(**STORY).ids == daemon.ask(temperature=0, **STORY).ids
        assert daemon.ask(**STORY).last.get("seed") is None
        [line] = daemon.logged("sampling defaults")
    assert line["temperature"] == "0 (built in)"


def test_a_recommendation_is_the_default(recommending, tmp_path):
    with real_daemon("--model", str(recommending), folder=tmp_path) as daemon:
        found = daemon.ask(**STORY)
        assert found.ids == daemon.ask(temperature=8, top_k=30, **STORY).ids
        assert found.ids != daemon.ask(temperature=0, **STORY).ids
        assert found.last["seed"] == 5
        [line] = daemon.logged("sampling defaults")
        [ignored] = daemon.logged("ignored a sampling parameter of the model file")
    assert (line["temperature"], line["top_k"]) == ("8 (model)", "30 (model)")
    assert ignored["reason"].startswith("general.sampling.top_p: top_p must be a number above 0, up to 1, not '7.0")


def test_a_setting_beats_the_recommendation(recommending, tmp_path):
    (tmp_path / "uma.yaml").write_text("sampling:\n  temperature: 0\n  top_p: 0.5\n")
    with real_daemon("--model", str(recommending), "--config", str(tmp_path / "uma.yaml"), folder=tmp_path) as daemon:
        assert daemon.ask(**STORY).last.get("seed") is None
        [line] = daemon.logged("sampling defaults")
    assert (line["temperature"], line["top_k"], line["top_p"]) == ("0 (server)", "30 (model)", "0.5 (server)")
