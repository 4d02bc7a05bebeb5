"""A draft model next to the embedded model: it keeps the contract, and its vocabulary must be the same."""

from __future__ import annotations

import pytest

from tests.support.draft_contract import *  # noqa: F403  (the tests)
from tests.support.draft_contract import drafts_after
from tests.support.gpu import agree
from tests.support.profile import part
from tests.support.random_adapters import two_adapters
from tests.support.real_daemon import real_daemon
from uma_trio import config
from uma_trio.engine_link.messages import Draft, DraftInput
from uma_trio.models.packaged import EMBEDDED

SMALL = {"parallel": 4, "batch_tokens": 64, "threads": 1}


@pytest.fixture
def open_engine(library):
    from uma_trio.engine.llama import LlamaEngine

    opened = []

    def open_engine(**settings):
        adapters = settings.pop("adapters", ())
        model = config.Model(**{**SMALL, "draft_model": str(EMBEDDED), **settings})
        opened.append(LlamaEngine(EMBEDDED, model, adapters=adapters))
        return opened[-1]

    yield open_engine
    for engine in opened:
        engine.close()


@pytest.fixture
def drafting(open_engine):
    """The embedded model is its own draft model.  Flash attention computes the rows of a step as it computes each alone."""
    return lambda: open_engine(ctx=1024, kv_unified="off", flash_attn="on")


@pytest.fixture(scope="module")
def prompts(library):
    from uma_trio.tokenizer.tokenizer import open_vocabulary

    texts = ("What is the capital of France?\n", "Repeat: one two three\n", "What is 3 + 4?\n")
    with open_vocabulary(EMBEDDED) as vocabulary:
        return [vocabulary.tokenizer.encode(text).tolist() for text in texts]


def test_drafts_end_where_they_are_unlikely_to_be_right(open_engine, prompts):
    engine = open_engine(ctx=1024)
    [sure] = engine.draft([DraftInput(0, 0, prompts[0], 8)], 0.5).drafts
    assert len(sure.tokens) == 8
    [unsure] = engine.draft([DraftInput(0, 0, [900, 17, 1200, 33], 8)], 0.99).drafts
    assert len(unsure.tokens) < 8


def test_nothing_is_proposed_behind_the_end_of_an_answer(open_engine, prompts):
    engine = open_engine(ctx=1024)
    [draft] = engine.draft([DraftInput(0, 0, prompts[0], 40)], 0.0).drafts
    assert 2 < len(draft.tokens) < 40
    assert [token in engine.info.eog_ids for token in draft.tokens] == [False] * (len(draft.tokens) - 1) + [True]
    assert draft.n_held == len(prompts[0]) + len(draft.tokens) - 1


def test_cells_of_other_sequences_make_room(open_engine, prompts):
    """The sequence that is computed keeps its cells; the others are lost, and their answers say so."""
    engine = open_engine(ctx=512, kv_unified="on")
    prompt = (prompts[0] * 64)[:64]
    for seq_id in range(4):
        for at in range(0, engine.info.n_ctx // 2, 64):
            [draft] = engine.draft([DraftInput(seq_id, at, prompt)], 0.0).drafts
            assert draft.n_held == at + 64
    assert drafts_after(engine, [*prompt, *prompt[:2]], 1, position=64).n_held == 0


@pytest.mark.parametrize(("failing", "code", "reason"), [(0, -3, "code -3"), (2, 2, "aborted"), (2, 1, "no room")])
def test_a_failed_call_costs_the_drafts_and_nothing_else(open_engine, prompts, monkeypatch, failing, code, reason):
    """All sequences lose theirs: what each has in the KV cache of the draft model is unknown then."""
    engine = open_engine(ctx=1024)
    inputs = [DraftInput(seq_id, 0, prompts[seq_id], 4) for seq_id in range(2)]
    expected = engine.draft(inputs, 0.0)
    context, calls = engine._drafter._context, iter(range(100))
    decode = context.decode
    monkeypatch.setattr(context, "decode", lambda batch: code if next(calls) >= failing else decode(batch))
    failed = engine.draft([DraftInput(seq_id, 0, [*prompts[seq_id], 9], 4) for seq_id in range(2)], 0.0)
    assert reason in failed.failure
    assert failed.drafts == [Draft(0, 0, ()), Draft(1, 0, ())]
    again = engine.draft(inputs, 0.0)  # on a new context, which is empty
    assert again.failure is None
    assert again.drafts == expected.drafts
    assert again.n_tokens == sum(map(len, prompts[:2]))


def test_another_vocabulary_is_refused(open_engine, tmp_path):
    import llama_abi

    other = tmp_path / "other.gguf"
    other.write_bytes(EMBEDDED.read_bytes().replace(b"Monday", b"Munday"))
    with pytest.raises(llama_abi.LlamaError, match=r"other.gguf has another vocabulary: token \d+ is ' ?Munday'"):
        open_engine(draft_model=str(other))
    with pytest.raises(llama_abi.LlamaError, match=r"other.gguf has another vocabulary"):  # and not that it is in use
        open_engine(draft_model=str(other), adapters=two_adapters(EMBEDDED))


def test_a_daemon_with_a_draft_model(library):
    """With flash attention, which computes one row like several on a CPU; see docs/design/llama-cpp.md."""
    questions = ["Tell me a story about a fox named Ada", "Count from 8 to 40 in steps of 3.", "the of and a to"]
    asked = [
        {"prompt": f"{text}\n", "max_tokens": 50, "temperature": t, "seed": 5, "ignore_eos": t > 0.5}
        for text in questions
        for t in (0.0, 0.5, 1.0)
    ]
    asked = [*part(asked, 4)]  # each question and each temperature once
    with real_daemon("--flash-attn", "on") as plain:
        expected = [plain.ask(**fields).ids for fields in asked]
    with real_daemon("--flash-attn", "on", "--draft-model", str(EMBEDDED)) as daemon:
        for fields, ids in zip(asked, expected, strict=True):
            assert agree(daemon.ask(**fields).ids, ids)
