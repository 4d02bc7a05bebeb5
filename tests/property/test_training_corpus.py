"""The training text of the embedded model: reproducible, and without the exam's questions."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from random import Random

import pytest

import uma_trio.models
from tests.support.documents import section
from tests.support.training_chats import messages_of
from uma_trio.daemon.prompts.template_worker import Renderer
from uma_trio.demo import script
from uma_trio.training import corpus
from uma_trio.training.bpe import BYTE_LETTERS, Tokenizer, cut, learn
from uma_trio.training.chat import CONTROLS, END, TEMPLATE, tokens_of
from uma_trio.training.evaluate import rendered
from uma_trio.training.sample import Sample, Turn, held_out, kept_from_training, keys_of
from uma_trio.training.skills import numbers, stories
from uma_trio.training.skills.capitals import COUNTRIES
from uma_trio.training.skills.documents import ask, make_document

MODELS = Path(uma_trio.models.__file__).parent
CARD = MODELS / "embedded" / "card.json"
PAGE = MODELS.parents[1] / "docs" / "EMBEDDED_MODEL.md"

SOME = 3000

FINGERPRINT = """
import hashlib, itertools
from uma_trio.training import corpus
digest = hashlib.sha256()
for kind in ("short", "medium", "long"):
    for sample in itertools.islice(corpus.samples_of_row(kind, 7), 300):
        digest.update(repr(sample).encode())
for question in corpus.exam(3):
    digest.update(repr(question).encode())
print(digest.hexdigest())
"""


def samples(kind: str = "short", amount: int = SOME, row: int = 0) -> list[Sample]:
    return list(itertools.islice(corpus.samples_of_row(kind, row), amount))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(CONTROLS, tuple(learn(corpus.tokenizer_texts(200), 250)))


@pytest.mark.thorough
def test_the_same_text_in_every_process() -> None:
    """Nothing may depend on the order of a set, which varies between processes."""
    prints = {
        subprocess.run(
            [sys.executable, "-c", FINGERPRINT],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "77")
    }
    assert len(prints) == 1


def test_rows_differ() -> None:
    assert samples(row=0, amount=20) != samples(row=1, amount=20)


@pytest.mark.parametrize("kind", ["short", "medium", "long"])
def test_no_held_out_question_is_trained_on(kind: str) -> None:
    assert not any(kept_from_training(sample) for sample in samples(kind, 1000))


def test_every_exam_question_is_held_out() -> None:
    questions = list(corpus.exam(6))
    assert {question.skill for question in questions} >= {skill.name for skill in corpus.SKILLS}
    for question in questions:
        assert held_out(keys_of(question.sample)[-1]), question


@pytest.mark.parametrize("kind", ["short", "medium", "long"])
def test_every_kind_of_row_has_tools_and_no_held_out_name(kind: str) -> None:
    chats = (sample for row in range(10) for sample in samples(kind, 40, row))
    tools = [json.loads(tool) for sample in chats for tool in sample.tools]
    assert tools
    assert not any(held_out(tool["function"]["name"]) for tool in tools)


def test_about_one_question_in_twenty_is_held_out() -> None:
    share = sum(held_out(f"What is {at} + 1?") for at in range(20_000)) / 20_000
    assert 0.04 < share < 0.06


def test_one_question_has_one_answer() -> None:
    """Otherwise no answer of the model could be called wrong."""
    answers: dict[str, str] = {}
    for sample in samples():
        for turn in sample.turns:
            if not turn.follows:
                assert answers.setdefault(turn.question, turn.answer) == turn.answer, turn


def test_a_turn_that_depends_on_others_is_held_out_with_them() -> None:
    first, again = Turn("What is the capital of Italy?", "x"), Turn("And of Peru?", "y", follows=True)
    alone, chat = Sample("x", (again,)), Sample("x", (first, again))
    assert keys_of(alone) != keys_of(chat)
    assert keys_of(chat)[0] == first.question


def test_decode_undoes_encode(tokenizer: Tokenizer) -> None:
    rng = Random(5)
    texts = [turn.question + turn.answer for sample in samples(amount=200) for turn in sample.turns]
    texts += ["", " ", "\n\n \t", "naïve 日本 🦊🦊", "it's 3 o'clock", "x" * 300]
    texts += ["  two  spaces  ", "\x00\x7f\u3000"]
    ranges = ((1, 128), (128, 0xD800), (0x1F000, 0x1FB00))
    texts += ["".join(chr(rng.randrange(*rng.choice(ranges))) for _ in range(rng.randrange(40))) for _ in range(300)]
    for text in texts:
        assert "".join(cut(text)) == text
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_control_tokens_in_a_text_are_not_parsed(tokenizer: Tokenizer) -> None:
    assert min(tokenizer.encode("<|im_end|><|bos|>")) >= len(CONTROLS)


def test_digits_and_bytes_beyond_ascii_are_not_merged(tokenizer: Tokenizer) -> None:
    """Numbers are tokenized digit by digit, and a character beyond ASCII is several tokens."""
    assert len(tokenizer.encode("12345")) == 5
    for text in ("ü", "日本", "🦊", "grüße"):
        beyond = sum(byte > 127 for byte in text.encode())
        assert sum(tokenizer.tokens[at] in BYTE_LETTERS[128:] for at in tokenizer.encode(text)) == beyond
    for one, other in tokenizer.merges:
        assert not any(letter.isdigit() for letter in one + other)


def test_merges_are_the_most_frequent_pairs_first() -> None:
    assert learn(["ab ab ab abc", "xy xy"], 2) == [("a", "b"), ("Ġ", "ab")]


def test_training_tokens_match_the_rendered_template(tokenizer: Tokenizer) -> None:
    template = Renderer(TEMPLATE, 1 << 20)
    chats = [sample for sample in samples("medium", 200) if not sample.raw]
    assert any(sample.tools for sample in chats)
    for sample in chats:
        ids, said = tokens_of(sample, tokenizer)
        variables = {"messages": messages_of(sample), "tools": [json.loads(tool) for tool in sample.tools]}
        rendered = template.render("2026-01-01", {**variables, "add_generation_prompt": False})
        assert _text(tokenizer, ids[1:]) == rendered
        learned = [at for at, wanted in zip(ids, said, strict=True) if wanted]
        assert _text(tokenizer, learned) == "".join(turn.answer + END for turn in sample.turns)


def test_a_prompt_of_the_exam_is_the_rendered_template() -> None:
    template = Renderer(TEMPLATE, 1 << 20)
    for question in corpus.exam(1):
        if not question.sample.raw:
            messages = messages_of(question.sample)[:-1]
            tools = [json.loads(tool) for tool in question.sample.tools]
            variables = {"messages": messages, "tools": tools, "add_generation_prompt": True}
            assert rendered(question.sample) == template.render("2026-01-01", variables)


def _text(tokenizer: Tokenizer, ids: Iterable[int]) -> str:
    """With control tokens spelled out."""
    spelled = (CONTROLS[at].encode() if at < len(CONTROLS) else _bytes(tokenizer, at) for at in ids)
    return b"".join(spelled).decode()


def _bytes(tokenizer: Tokenizer, token: int) -> bytes:
    return bytes(BYTE_LETTERS.index(letter) for letter in tokenizer.tokens[token])


def test_the_loss_of_a_raw_sample_covers_its_line_break(tokenizer: Tokenizer) -> None:
    ids, said = tokens_of(Sample("x", (Turn("2 + 2", "4"),), raw=True), tokenizer)
    learned = [at for at, wanted in zip(ids, said, strict=True) if wanted]
    assert tokenizer.decode(learned) == "\n4"
    assert learned[-1] == tokenizer.control("<|endoftext|>")


def test_a_document_contains_its_facts() -> None:
    document = make_document(3, 60)
    assert document == make_document(3, 60) != make_document(4, 60)
    assert len(document.facts) > 40
    assert all(turn.answer in document.text for turn in document.facts)
    assert len({turn.question for turn in document.facts}) == len(document.facts)
    assert f"## {len(document.sections)}. {document.sections[-1]}" in document.text
    assert any(turn.answer == f'The title is "{document.title}".' for turn in document.overview)
    assert ask(document, "Why?").endswith("\n\nWhy?")


def test_the_demo_reads_a_generated_document() -> None:
    """The demo has a copy, because the wheel does not have the generator."""
    assert script.DOCUMENT.read_text() == make_document(seed=1, facts=300).text + "\n"
    assert script.streams()[3].questions[0].text == ask(make_document(seed=1, facts=300), "Summarise the document.")


def test_generators_give_known_results() -> None:
    assert len(COUNTRIES) > 150
    assert COUNTRIES["Australia"] == ("Canberra", "Oceania")
    assert numbers.count_answer(8, 14, 2) == "8, 10, 12, 14."
    assert numbers.count_answer(3, 1, lines=True) == "3\n2\n1"
    story = stories.story("Mia", "fox", "forest", 12)
    assert story.count("\nPart ") == 12
    assert story == stories.story("Mia", "fox", "forest", 12)


def test_the_card_matches_the_model_and_the_page() -> None:
    from uma_trio.training.card import table

    figures = json.loads(CARD.read_text())
    model = CARD.with_name("embedded.gguf").read_bytes()
    assert hashlib.sha256(model).hexdigest() == figures["sha256"]
    assert len(model) == figures["bytes"] <= 8 << 20
    shown = {line for line in section(PAGE.read_text(), "The exam").splitlines() if line.startswith("|")}
    assert shown <= set(table(figures).splitlines())
    weak = {mark["skill"] for mark in figures["exam"]["skills"] if mark["right"] < 0.95 * mark["asked"]}
    assert {line.split(" | ")[0].strip("| ") for line in shown} >= {*weak, "**tools**", "**all**"}
