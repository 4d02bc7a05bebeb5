"""The project's vocabulary: replaced names and phrases do not come back.

One concept has one name, everywhere, and it is the field's word.  ``WORDS``, ``NAMES`` and ``PHRASES`` list what was
replaced, each with the word to use.  ``VAGUE_NAMES`` bounds names that may stand for anything.
"""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs
import pytest

import uma_trio

ROOT = Path(uma_trio.__file__).parent.parent

WORDS = {
    r"apart": "separately; of the KV cache: per-sequence KV",
    r"beside": "next to, with",
    r"chained": "run-ahead",
    r"circumstances": "environment_fingerprint, environment",
    r"guess(es|ed|ing)?": "draft token; of a number: estimate",
    r"intake": "admission, admit()",
    r"(?<!--)jobs?": "Answer",  # --jobs is an option of build_llama.sh, as of make
    r"landed": "complete, StepOutput",
    r"nonetheless": "leave it out",
    r"retired?": "finish",
    r"shelf": "OffloadIndex",
    r"spill(s|ed|er|ing)?": "offload, swap out",
    r"surprising": "is_outlier",
    r"telling": "output processing",
    r"told": "gets, reports, is sent",
    r"unspilled": "unsaved",
    r"wish(es|ed)?": "request, SamplingParams",
}
"""Whole words, in prose and as parts of identifiers."""

NAMES = {
    "Book": "a name that says what it holds: Stats, SessionTable",
    "Draw": "SampleRequest",
    "E_LIMIT_SESSIONS": "E_LIMIT_CONNECTIONS",
    "Edit": "KvOp",
    "EngineThread": "ThreadLauncher, EngineLink",
    "Feed": "StepInput",
    "Flight": "InFlightStep",
    "Forget": "DropCheckpoint",
    "House": "ModelService",
    "Job": "Answer",
    "Landed": "StepOutput",
    "Mark": "SaveCheckpoint",
    "ModelFacts": "ModelInfo",
    "Rewinding": "Truncation",
    "Runner": "Scheduler",
    "Saved": "SavedState",
    "Share": "PrefillChunk",
    "Shelf": "OffloadIndex",
    "Slot": "SequenceView",
    "Spiller": "Offloader",
    "StepResult": "StepOutput",
    "TooManySessions": "TooManyConnections",
    "accepted_total": "accepted_draft_tokens_total",
    "chained_total": "run_ahead_steps_total",
    "drafted_total": "draft_tokens_total",
    "known_costs": "tuning_cache",
    "load_model": "open_model",
    "mark_bytes": "MeasureState, state_sizes",
    "n_fed": "n_computed",
    "rewinds": "can_truncate",
    "sessions_inter_token_ms": "requests_inter_token_ms",
    "state_bytes": "MeasureState, state_sizes",
    "states_rewind": "state_can_truncate",
    "submit_all": "submit",
    "took_ms": "duration_ms",
}
"""Whole identifiers; in documents, in code spans."""

ATTRIBUTES = {
    "pace": "timings, StepTimings",
    "pads": "AttentionScan.LONGEST",
    "piece": "token_to_bytes",
    "pieces": "tokens_to_bytes",
    "slot": "sequence, view()",
}
"""Attributes and functions; fine as names of variables."""

PHRASES = {
    r"--max-sessions|UMA_MAX_SESSIONS|limits\.max_sessions": "max_connections",
    r"(came|comes?|coming) true": "accepted",
    r"none the less": "leave it out",
    r"(needed|there) no longer|no longer needed that": "is no longer needed",
    r"prompts? (is|are|was|were|being|been|be) read": "prefill, is prefilled",
    r"(is|are|being) (being )?read in turns?": "are prefilled in turns",
    r"reading (a|the|its|their|some|long|other) (long )?prompts?": "prefill",
    r"while [a-z ]{0,20}(prompt|document)s?\b[^.]{0,20}\b(is|are) (being )?read": "during prefill",
    r"(was|were|is|are|been|be) said": "the conversation, the messages, the answer",
    r"[,;:(] else\b": "otherwise",
    r"\b(came|comes?) of (it|a|the|one|them)\b": "the result of ...; a noun",
    r"\bhears? of\b": "learns of, gets",
    r"something else than": "something other than",
    r"those first that": "the least recently used ones first",
    r"last (used|changed|updated) first": "most recently used first",
    r"(?<!there\s)(is|are) no (JSON|URL|name|module|constraint|controller|page|number|file|object|model|schema|grammar|adapter|function|perf log|character)\b": "is not a ..., is not valid JSON",
}
"""In prose: docstrings, comments, texts for users, documents."""

VAGUE_NAMES = {
    "uma_trio": {"found": 0.1, "each": 0.1},
    "llama_abi": {"found": 0.3, "each": 0.3},
    "benches": {"found": 0.2, "each": 0.1},
}
"""By folder, how often a variable may be called ``found`` in 1,000 lines, and how many loops may go over ``each``.

A variable says what it holds: ``tokens``, ``path``, ``reply``; a loop goes over the singular of its sequence.  Lower a
number when there are fewer.
"""

FOLDERS = ("uma_trio", "llama_abi", "tests", "benches")

TEXTS_OF_THE_EMBEDDED_MODEL = ROOT / "uma_trio" / "training"
"""Stories and answers that the model learns: their words are theirs."""


@attrs.frozen
class Finding:
    """One replaced word."""

    file: Path
    line: int
    word: str
    use: str

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line}: {self.word!r}; say: {self.use}"


def sources() -> list[Path]:
    return sorted(
        file
        for folder in FOLDERS
        for file in (ROOT / folder).rglob("*.py")
        if TEXTS_OF_THE_EMBEDDED_MODEL not in file.parents and file != Path(__file__)
    )


def documents() -> list[Path]:
    pages = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]
    return sorted(pages)


GAP = r"\s+(?:#\s+)?"
"""Between the words of a phrase: also the end of a line, in a comment too."""

WORD = re.compile(rf"(?<![a-z])({'|'.join(WORDS)})(?![a-z])", re.IGNORECASE)
PHRASE_USES = {re.compile(pattern.replace(" ", GAP), re.IGNORECASE): use for pattern, use in PHRASES.items()}
NAME = re.compile(rf"\b({'|'.join(NAMES)})\b")
OF = re.compile(r"""r?["']+\s*Of\s""")
PART = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


def in_prose(text: str, file: Path, line: int) -> Iterator[Finding]:
    """Replaced words and phrases in a text that begins at ``line``."""

    def at(match: re.Match[str]) -> int:
        return line + text.count("\n", 0, match.start())

    for match in WORD.finditer(text):
        yield Finding(file, at(match), match[0], use_for(match[0]))
    for pattern, use in PHRASE_USES.items():
        for match in pattern.finditer(text):
            yield Finding(file, at(match), " ".join(re.sub("# ", "", match[0]).split()), use)


@functools.cache
def use_for_identifier(name: str) -> str | None:
    """What to use for a replaced name, or for one with a replaced word as a part."""
    parts = (part for part in PART.findall(name) if WORD.fullmatch(part))
    return NAMES.get(name) or next(map(use_for, parts), None)


def use_for(word: str) -> str:
    return next(use for pattern, use in WORDS.items() if re.fullmatch(pattern, word, re.IGNORECASE))


def in_source(file: Path, source: str) -> Iterator[Finding]:
    """Replaced names and words in a Python file."""
    comment: list[str] = []
    begins = ends = 0
    before = ""
    begins_statement = True
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if token.start[0] != ends + 1:
                yield from in_prose("\n".join(comment), file, begins)
                comment, begins = [], token.start[0]
            comment.append(token.string)
            ends = token.start[0]
        elif token.type == tokenize.NAME:
            if (use := use_for_identifier(token.string)) is not None:
                yield Finding(file, token.start[0], token.string, use)
            if before in (".", "def") and token.string in ATTRIBUTES:
                yield Finding(file, token.start[0], token.string, ATTRIBUTES[token.string])
        elif tokenize.tok_name[token.type] in ("STRING", "FSTRING_MIDDLE"):
            yield from in_prose(token.string, file, token.start[0])
            if begins_statement and OF.match(token.string):
                yield Finding(file, token.start[0], "Of ...", "a docstring starts with a verb or a noun phrase")
        if token.type not in (tokenize.NL, tokenize.COMMENT):
            begins_statement = token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
        before = token.string
    yield from in_prose("\n".join(comment), file, begins)


def in_document(page: Path, text: str) -> Iterator[Finding]:
    """Replaced words in a page, and replaced names in its code spans."""
    yield from in_prose(text, page, 1)
    for match in re.finditer(r"`([^`\n]+)`", text):
        for name in NAME.findall(match[1]):
            yield Finding(page, 1 + text.count("\n", 0, match.start()), name, NAMES[name])


def vague_names(source: str) -> Counter[str]:
    """Count what ``VAGUE_NAMES`` bounds in a Python file."""
    counts = Counter[str]()
    if re.search(r"\bfound\b|\beach in\b", source) is None:  # to parse takes long
        return counts
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Name(id="found") | ast.arg(arg="found"):
                counts["found"] += 1
            case ast.For(target=ast.Name(id="each")) | ast.AsyncFor(target=ast.Name(id="each")):
                counts["each"] += 1
            case ast.comprehension(target=ast.Name(id="each")):
                counts["each"] += 1
    return counts


def check(findings: Sequence[Finding]) -> None:
    assert not findings, f"{len(findings)} replaced words\n" + "\n".join(map(str, findings))


@pytest.mark.parametrize("folder", FOLDERS)
def test_code_uses_the_fields_words(folder: str) -> None:
    files = [file for file in sources() if ROOT / folder in file.parents]
    check([finding for file in files for finding in in_source(file, file.read_text())])


@pytest.mark.parametrize("folder", VAGUE_NAMES)
def test_few_names_are_vague(folder: str) -> None:
    texts = [file.read_text() for file in sources() if ROOT / folder in file.parents]
    counts, n_lines = sum(map(vague_names, texts), Counter[str]()), sum(text.count("\n") for text in texts)
    for name, most in VAGUE_NAMES[folder].items():
        rate = 1000 * counts[name] / n_lines
        assert rate <= most, f"{folder}: {rate:.2f} times {name!r} in 1,000 lines; call variables what they hold"


def test_documents_use_the_fields_words() -> None:
    check([finding for page in documents() for finding in in_document(page, page.read_text())])


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("class Job: ...", ["Job"]),
        ("self._spill_mb = n_guesses", ["_spill_mb", "n_guesses"]),
        ("def test_told_apart(): ...", ["test_told_apart"]),
        ("# while prompts are\n# read", ["while prompts are read", "prompts are read"]),
        ("x = 1  # beside it", ["beside"]),
        ('def f():\n    """Of a sequence."""', ["Of ..."]),
        ("x = 1\n\n'Of x.'\n", ["Of ..."]),
        ("print('Of course',\n    'Of x')", []),
        ('"""Some draft\n\nthat came\ntrue."""', ["came true"]),
        ("spilling = SpillWay", ["spilling", "SpillWay"]),
        ("for job_id in jobs: ...", ["job_id", "jobs"]),
        ("itertools.chain(); attrs.define(slots=False); besides = departed = reread", []),
        ("job.pads = pads(piece)", ["job", "pads"]),
        ("f'--max-sessions {max_sessions}'", ["--max-sessions"]),
        ("value = a if b else c  # a prompt that a client sends", []),
    ],
)
def test_findings_in_code(source: str, words: list[str]) -> None:
    assert sorted(finding.word for finding in in_source(ROOT / "x.py", source)) == sorted(words)


def test_vague_names_are_counted() -> None:
    source = "found = 'found'  # found\nfor each in found: print(self.found, [each for each in ()])\ndef f(found): ..."
    assert vague_names(source) == {"found": 3, "each": 2}


def test_findings_in_documents() -> None:
    text = "# Title\n\nA `Job` is a request,\nand a guess.\nA [link](x), else `load_model()`.\n"
    findings = [(finding.line, finding.word) for finding in in_document(ROOT / "x.md", text)]
    assert sorted(findings) == [(3, "Job"), (3, "Job"), (4, "guess"), (5, ", else"), (5, "load_model")]
