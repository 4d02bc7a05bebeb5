r"""``\d``, ``\w``, ``\s`` and their negations match ASCII, as with ``re.ASCII`` in Python, wherever a regex may stand."""

from __future__ import annotations

import random
import re
import warnings
from functools import cache

import pytest
from llguidance import LLMatcher, LLTokenizer

from tests.support.profile import amount
from uma_trio.errors import InvalidConstraint
from uma_trio.grammar.checker import LocalChecker
from uma_trio.grammar.compiler import GrammarCompiler
from uma_trio.grammar.vocabulary import Vocabulary, start_matcher
from uma_trio.protocol.requests import Constraint

END = 256
CLASSES = (r"\d", r"\D", r"\w", r"\W", r"\s", r"\S")
LITERALS = ("a", "7", "_", "/", " ", "\n", "é", "٣", "\u00a0", r"\\", r"\.", r"\-", r"\]", r"\t")
CHARACTERS = "aZ7_/ \n\t\v\u001f-.]\\é٣²ſ\u00a0\u2028🯰"
PREFIXES = ("", "7", "\\", "\\d", "aé")


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(vocabulary, LocalChecker(vocabulary))


@cache
def vocabulary() -> Vocabulary:
    tokens = [*(bytes([n]) for n in range(256)), b"<end>"]
    return Vocabulary(tokens, [END], [END], None, lambda text: list(text.encode()))


@cache
def tokenizer() -> LLTokenizer:
    return vocabulary().tokenizer()


@cache
def started(source: str) -> LLMatcher:
    return start_matcher(tokenizer(), source)


def matches(constraint: Constraint, text: str) -> bool:
    try:
        source = compiler().compile(constraint).source
    except InvalidConstraint as error:
        if "no text matches it" not in str(error):
            raise
        return False
    matcher = started(source).deep_copy()
    tokens = [*text.encode()]
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


def atom(chance: random.Random) -> str:
    kind = chance.randrange(4)
    if kind == 0:
        return chance.choice(LITERALS)
    if kind == 1:
        return chance.choice(CLASSES)
    items = [
        chance.choice(("a-f", "0-3", "é", "_", r"\\", r"\]", "/", " ", *CLASSES)) for _ in range(chance.randint(1, 3))
    ]
    hyphen = chance.choice(("", "", "-"))
    return f"[{chance.choice(('', '^'))}{hyphen}{''.join(items)}{chance.choice(('', '', '-'))}]"


def expression(chance: random.Random) -> str:
    parts = [atom(chance) + chance.choice(("", "", "?", "{1,2}")) for _ in range(chance.randint(1, 3))]
    if chance.random() < 0.2:
        parts.append(f"(?:{atom(chance)}|{atom(chance)})")
    return "".join(parts)


@pytest.mark.parametrize("seed", range(amount(quick=30, thorough=1000)))
def test_as_in_python(seed):
    chance = random.Random(seed)
    regex = expression(chance)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # "[[" and "--" will be set operations in Python, too
        expected = re.compile(regex, re.ASCII)
    texts = {"".join(chance.choices(CHARACTERS, k=chance.randint(0, 4))) for _ in range(60)} | {*CHARACTERS}
    lark = "start: /" + regex.replace("/", r"\/").replace("\n", r"\n") + "/"
    for text in texts:
        wanted = expected.fullmatch(text) is not None
        assert matches(Constraint(regex=regex), text) == wanted, (regex, text)
        assert matches(Constraint(lark=lark), text) == wanted, (lark, text)


@pytest.mark.parametrize(
    ("regex", "text", "wanted"),
    [
        (r"\d{4}-\d{2}", "1097-03", True),
        (r"\d{4}-\d{2}", "1097-🯰3", False),
        (r"\\d", r"\d", True),
        (r"\\d", r"\7", False),
        (r"\\\d", r"\7", True),
        (r"\p{Nd}", "٣", True),
        (r"[\p{L}\d]+", "é7", True),
        (r"[\w--\d]+", "a_", True),
        (r"[\w--\d]+", "a7", False),
        (r"[\w&&[^\d]]+", "a_", True),
        (r"[\w-.]+", "a-b.c", True),
        (r"[.-\d]+", ".-7", True),
        (r"[.-\d]+", "/", False),
        (r"a-\d", "a-7", True),
    ],
)
def test_examples(regex, text, wanted):
    assert matches(Constraint(regex=regex), text) == wanted


@pytest.mark.parametrize(
    ("constraint", "good", "bad"),
    [
        (Constraint(lark='start: "/\\\\d" A // /\\d/\nA: /\\d/ # /\\w/'), r"/\d7", r"/\d٣"),
        (Constraint(lark='start: %json {"type": "string", "pattern": "^\\\\d$"}'), '"7"', '"٣"'),
        (Constraint(json_schema={"type": "string", "pattern": r"^[\d_]$"}), '"7"', '"٣"'),
        (Constraint(json_schema={"type": "string", "pattern": r"^\w$"}), '"a"', '"é"'),
        (
            Constraint(json_schema={"patternProperties": {r"^\d$": {"type": "null"}}, "additionalProperties": False}),
            '{"7": null}',
            '{"٣": null}',
        ),
    ],
    ids=["lark", "JSON in lark", "pattern with a set", "pattern", "patternProperties"],
)
def test_grammars_and_schemas(constraint, good, bad):
    assert matches(constraint, good)
    assert not matches(constraint, bad)


@pytest.mark.parametrize(
    ("constraint", "place"),
    [
        (Constraint(regex=r"\d\d/("), "character 6"),
        (Constraint(lark='start: /\\d\\d\\w+(/'), r"regex \d\d\w+(, character 8"),
        (Constraint(lark="start: /\\d/ /\\w/ )"), "line 1, column 18"),
    ],
)  # fmt: skip
def test_errors_speak_of_what_the_client_wrote(constraint, place):
    with pytest.raises(InvalidConstraint) as error:
        compiler().compile(constraint)
    assert place in str(error.value)
