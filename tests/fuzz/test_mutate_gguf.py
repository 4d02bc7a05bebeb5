"""A short run of the GGUF mutations; ``python -m tests.fuzz.mutate_gguf`` is the long one."""

from __future__ import annotations

import os
import time

import pytest

import llama_abi
from tests.fuzz import mutate_gguf
from tests.fuzz.mutate_gguf import BAD, Gguf, mutant, run
from tests.support.real_daemon import missing
from uma_trio.models.gguf_check import check_gguf

N_FILES = 120


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    if (reason := missing()) is not None:
        pytest.skip(reason)
    if not mutate_gguf.SENTENCEPIECE.exists():
        pytest.skip(f"{mutate_gguf.SENTENCEPIECE} does not exist; ./build_llama.sh unpacks it")
    return mutate_gguf.make_bases(tmp_path_factory.mktemp("bases"))


def test_no_mutant_ends_the_process(bases):
    found = list(run(bases, range(N_FILES), seed=1, timeout_s=60))
    assert sorted(result.case for result in found) == list(range(N_FILES))
    bad = [f"{result}: {mutant(bases, 1, result.case)[1]}" for result in found if result.outcome in BAD]
    assert not bad, "\n".join(bad)
    assert {result.outcome for result in found} == {"refused by us", "refused by the library", "ran"}


def test_the_bases_are_valid_and_run(bases, tmp_path):
    path = tmp_path / "base.gguf"
    for base in bases:
        assert Gguf.parse(base).to_bytes() == base
        path.write_bytes(base)
        mutate_gguf.run_file(llama_abi.load(), path, check_gguf(path).purpose)


def test_a_mutant_depends_on_its_seed_and_number_alone(bases):
    assert mutant(bases, 0, 5) == mutant(bases, 0, 5)
    assert mutant(bases, 0, 5) != mutant(bases, 1, 5)


def _misbehave(pipe, folder, bases, seed):
    while True:
        match pipe.recv():
            case 1:
                (folder / "stderr").write_text("loading\nGGML_ASSERT(n > 0) failed\n")
                os.abort()
            case 2:
                time.sleep(60)
            case _:
                pipe.send(("ran", ""))


def test_a_dead_child_and_a_hung_one_are_reported_and_replaced():
    found = {result.case: result for result in run([], range(5), workers=1, timeout_s=1, serve=_misbehave)}
    assert [found[case].outcome for case in range(5)] == ["ran", "aborted", "hung", "ran", "ran"]
    assert found[1].message == "GGML_ASSERT(n > 0) failed (exit code -6)"
