"""Short runs of the fuzzer; run ``python -m tests.fuzz.fuzz`` for long ones."""

from __future__ import annotations

from random import Random

import pytest

from tests.fuzz import fuzz, generate
from tests.support.profile import amount
from tests.support.real_daemon import missing


def test_codecs(tmp_path):
    fuzzer = fuzz.Fuzzer(seed=1, folder=tmp_path)
    fuzzer.codecs(2000)
    assert fuzzer.found == []
    seen = {ending.removeprefix("codec: ") for ending in fuzzer.endings}
    assert seen >= {"Generate", "Cancel", "MetricsQuery", "E_PROTO_INVALID_JSON", "E_PROTO_INVALID_CBOR"}
    assert seen >= {"E_PROTO_BAD_REQUEST", "E_PROTO_TRUNCATED", "E_PROTO_FRAME_TOO_LARGE"}


def test_socket(tmp_path):
    if (reason := missing()) is not None:
        pytest.skip(reason)
    n = amount(quick=100, thorough=300)
    assert fuzz.fuzz(cases=n, live=n, seed=1, folder=tmp_path).found == []


def test_seed_and_number_determine_a_case():
    assert generate.case(Random("0 codec 5")) == generate.case(Random("0 codec 5"))


def test_findings_are_saved_and_named(tmp_path, capsys):
    def check(data, rng):
        fuzz.require(len(data) < 100, "too long for this test")
        return "short"

    fuzzer = fuzz.Fuzzer(seed=3, folder=tmp_path)
    for number in range(20):
        fuzzer.run("codec", number, check)
    saved = list(tmp_path.iterdir())
    assert len(saved) == len(fuzzer.found) > 0
    assert all(len(path.read_bytes()) >= 100 for path in saved)
    assert f"--replay {saved[0]}" in capsys.readouterr().out
