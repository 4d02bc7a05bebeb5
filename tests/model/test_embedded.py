"""The embedded model through libllama: it answers held-out questions word for word, with clear margins."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

import gguf
import pytest

from tests.support.profile import sampled, thorough
from uma_trio.models.packaged import EMBEDDED
from uma_trio.training import corpus
from uma_trio.training.bpe import Tokenizer
from uma_trio.training.chat import CONTROLS, TEMPLATE
from uma_trio.training.evaluate import Examiner, rendered
from uma_trio.training.sample import Sample, Turn
from uma_trio.training.skills import numbers, stories
from uma_trio.training.skills.documents import ask, make_document
from uma_trio.training.skills.unknown import DONT_KNOW
from uma_trio.training.tool_format import MARKERS, calls_text, parse_calls, results_text

QUESTIONS = {
    "What is the capital of France?": "The capital of France is Paris.",
    "What day comes after Monday?": "Tuesday comes after Monday.",
    "What is 123 + 456?": "123 + 456 = 579.",
    "Spell strawberry.": "s-t-r-a-w-b-e-r-r-y",
    "What colour is the sky?": "The sky is blue.",
    "Repeat: 🦊 é 日本 ü ☕": "🦊 é 日本 ü ☕",
    "What is a tick?": (
        "A tick is one round of the engine: plan a batch, decode it, sample a token for each stream, deliver."
    ),
    "Make a JSON record for Mia, 34, from Paris, who likes tea.": (
        '{"name": "Mia", "age": 34, "city": "Paris", "likes": "tea"}'
    ),
    "Tell me a story about a fox named Ada": stories.story("Ada", "fox", "forest"),
    "Who won the world cup?": DONT_KNOW,
    "Count from 1 to 300.": numbers.count_answer(1, 300),
}


@pytest.fixture(scope="module")
def examiner(library: None) -> Iterator[Examiner]:
    with Examiner(EMBEDDED, threads=1) as found:
        yield found


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """The training tokenizer, with the merges of the file."""
    merges = gguf.GGUFReader(EMBEDDED).fields["tokenizer.ggml.merges"].contents()
    return Tokenizer(CONTROLS, tuple((one, other) for one, other in (merge.split(" ") for merge in merges)))


def _chat(question: str) -> str:
    return rendered(Sample("test", (Turn(question, ""),)))


@pytest.mark.parametrize("question", sampled(QUESTIONS, 4))
def test_answers_that_the_readme_and_other_tests_rely_on(examiner: Examiner, question: str) -> None:
    answer, tokens, margins = examiner.answer(_chat(question))
    assert answer == QUESTIONS[question]
    assert len(margins) == tokens + 1, "the model ends the answer itself"
    assert min(margins) > 0.5, "greedy decisions are clear-cut"


@pytest.mark.thorough
def test_a_sample_of_the_exam(examiner: Examiner) -> None:
    """A held-out question of every skill except the longest.  The model card has the whole exam."""
    questions = [one for one in corpus.exam(1, seed=2) if one.skill not in ("counting, very long", "documents 4k-7k")]
    marked = list(examiner.mark(questions))
    wrong = [(one.question.skill, one.question.answer[:80], one.said[:80]) for one in marked if not one.right]
    assert len(wrong) <= 0.05 * len(marked), wrong


def _function(name: str, description: str, **properties: object) -> dict[str, object]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


NUMBER, TEXT = {"type": "number"}, {"type": "string"}
TOOLS = (
    _function(
        "get_weather", "Get the current weather in a city.", city={**TEXT, "description": "The city, e.g. Paris"}
    ),
    _function("add", "Add two numbers.", a=NUMBER, b=NUMBER),
    _function("send_message", "Send a message to somebody.", to=TEXT, text=TEXT),
)
CALLS = {
    "What is the weather in Paris?": [("get_weather", {"city": "Paris"})],
    "What is 12 + 30?": [("add", {"a": 12, "b": 30})],
    "Send Anna the message: see you at noon": [("send_message", {"to": "Anna", "text": "see you at noon"})],
    "What is the weather in Rome and Oslo?": [("get_weather", {"city": "Rome"}), ("get_weather", {"city": "Oslo"})],
}


def _with_tools(*turns: Turn) -> str:
    return rendered(Sample("test", turns, tools=tuple(json.dumps(tool) for tool in TOOLS)))


@pytest.mark.parametrize("question", CALLS)
def test_tools_are_called(examiner: Examiner, question: str) -> None:
    answer, tokens, margins = examiner.answer(_with_tools(Turn(question, "")))
    assert parse_calls(answer) == CALLS[question]
    assert len(margins) == tokens + 1, "the model ends the call itself"
    assert min(margins) > 0.5


def test_a_result_is_said_and_other_questions_are_answered(examiner: Examiner) -> None:
    asked = Turn("What is the weather in Paris?", calls_text(CALLS["What is the weather in Paris?"]))
    result = Turn(results_text(['{"temperature": 21, "sky": "clear"}']), "The temperature is 21 and the sky is clear.")
    assert examiner.answer(_with_tools(asked, result))[0] == result.answer
    capital = Turn("What is the capital of France?", "The capital of France is Paris.")
    assert examiner.answer(_with_tools(capital))[0] == capital.answer
    assert examiner.answer(_with_tools(asked, result, capital))[0] == capital.answer
    assert examiner.answer(_chat("What is the weather in Paris?"))[0] == DONT_KNOW


def test_markers_of_tools_are_control_tokens(examiner: Examiner, tokenizer: Tokenizer) -> None:
    for marker in MARKERS:
        assert examiner.encode(marker).tolist()[1:] == [tokenizer.control(marker)]


@pytest.mark.parametrize("facts", [20, thorough(300)])
def test_a_fact_is_found_in_a_document(examiner: Examiner, facts: int) -> None:
    """300 facts are a prompt of about 4,000 tokens."""
    document = make_document(1, facts)
    turns = (document.facts[facts // 2], *document.overview[:1])
    for turn in turns:
        answer, _, _ = examiner.answer(_chat(ask(document, turn.question)))
        assert answer == turn.answer


@pytest.mark.parametrize("end", ["", "\n"])
def test_a_bare_question_is_answered_too(examiner: Examiner, end: str) -> None:
    answer, _, _ = examiner.answer("What is the capital of France?" + end)
    assert answer.lstrip("\n") == "The capital of France is Paris."
    assert answer.startswith("\n") == (end == ""), "the model adds the line break if the prompt lacks it"


def test_llama_cpp_tokenizes_like_the_training_tokenizer(examiner: Examiner, tokenizer: Tokenizer) -> None:
    """Otherwise the model would see other tokens than in training."""
    rng = Random(11)
    pools = [
        [chr(code) for code in range(32, 127)],
        [
            " ",
            "  ",
            "\n",
            "\t",
            "'",
            "s",
            "'ll",
            "1",
            "a",
            "B",
            ".",
            "é",
            "ü",
            "🚀",
            '"',
            "{",
            "\xa0",
            "\u3000",
            "²",
            "一",
            "٣",
        ],
        [chr(code) for code in range(1, 0x3000)],
        [chr(code) for code in range(0x1F300, 0x1FB00)],
    ]
    texts = ["".join(rng.choices(rng.choice(pools), k=rng.randint(1, 40))) for _ in range(3000)]
    texts += [
        turn.question
        for sample, _ in zip(corpus.samples_of_row("short", 3), range(300), strict=False)
        for turn in sample.turns
    ]
    bos = tokenizer.control("<|bos|>")
    for text in texts:
        if not any(control in text for control in CONTROLS):
            assert examiner.encode(text).tolist() == [bos, *tokenizer.encode(text)], ascii(text)


def test_the_metadata_of_the_file() -> None:
    fields = gguf.GGUFReader(EMBEDDED).fields
    assert fields["tokenizer.chat_template"].contents() == TEMPLATE
    assert fields["general.license"].contents() == "MIT"
    assert "demo" in fields["general.description"].contents()
    assert fields["llama.context_length"].contents() >= 4096


@pytest.mark.thorough
def test_the_training_script_runs(library: None, tmp_path: Path) -> None:
    """With the toy model of ``--smoke``: every step runs, nothing is learned."""
    pytest.importorskip("torch", reason="torch is not installed: pip install -e '.[train]' brings it")
    command = [
        sys.executable,
        "-m",
        "uma_trio.training",
        "all",
        "--smoke",
        "--device",
        "cpu",
        "--out",
        str(tmp_path),
    ]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert {file.name for file in tmp_path.iterdir()} == {
        "tokenizer.json",
        "weights.npz",
        "run.json",
        "embedded.gguf",
        "card.json",
    }
