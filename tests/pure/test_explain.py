"""Messages about constraints: in words of the client, with a keyword or a position that the client knows."""

from tests.support.cases import all_cases
from uma_trio.grammar.explain import explain, explain_constraint
from uma_trio.protocol.field_errors import FieldError
from uma_trio.protocol.requests import Constraint

SCHEMA = "at 1(8): failed to compile JSON schema: {}\n   1 | start: %json {{...}}\n              ^\n"
TYPES = "string, number, integer, boolean, null, array or object"
REGEX = (
    'at 1(8): invalid regex "..." (in regex): regex parse error:\n    {}\n{}^^\nerror: {}\n   1 | start: /.../\n    ^\n'
)


@all_cases(
    ("error", "message"),
    [
        ('Unimplemented keys: ["not"]', "constraint.json_schema, properties.a.items[1]: not supported: not"),
        ("Invalid type: obj", f"constraint.json_schema: obj is no type; it may be {TYPES}"),
        ("Unknown format: nothing", "constraint.json_schema: Unknown format: nothing"),
        ("Pointer '/$defs/x' does not exist", "constraint.json_schema: $ref #/$defs/x leads nowhere"),
        ("Expected f64 for 'minimum', got \"a\"", "constraint.json_schema: Expected number for 'minimum', got \"a\""),
        (
            "Failed to generate regex for float range: min=Some(1e300), max=None",
            "constraint.json_schema: no range of numbers from 1e300 to any can be followed",
        ),
        (
            "Resource 'file:///etc/passwd' is not present in a registry and retrieving it failed: Default retriever",
            "constraint.json_schema: $ref file:///etc/passwd leads out of the schema; only its own parts can be referred to",
        ),
        (
            "regex parse error:\n    (a\n    ^\nerror: unclosed group",
            "constraint.json_schema, regex (a, character 1: unclosed group",
        ),
    ],
)
def test_a_schema(error, message):
    schema = {"properties": {"not": {}, "a": {"const": {"not": 1}, "items": [{}, {"not": {}}]}}}
    found = explain_constraint(SCHEMA.format(error), Constraint(json_schema=schema))
    assert found == FieldError("constraint.json_schema", message)


@all_cases(
    ("regex", "escaped", "column", "character"),
    [
        ("a(b", "a(b", 1, 2),
        ("x/y(", r"x\/y(", 4, 4),
        ("a\nb[", r"a\nb[", 4, 4),
        (r"\/(", r"\/(", 2, 3),
        ("é(", "é(", 1, 2),
    ],
)
def test_a_position_in_a_regex_is_the_clients(regex, escaped, column, character):
    error = REGEX.format(escaped, " " * (4 + column), "unclosed group")
    message = f"constraint.regex, character {character}: unclosed group"
    assert explain_constraint(error, Constraint(regex=regex)) == FieldError("constraint.regex", message)


@all_cases(
    ("error", "message"),
    [
        (
            'at 2(4): unknown name: "b"\n   1 | start: A\n   2 | A: b\n          ^\n',
            'line 2, column 4: unknown name: "b"',
        ),
        ("no start rule found", "no start rule found"),
        ("NoExtensionBias\n<non-verbose/>", "no text matches it"),
    ],
)
def test_a_grammar(error, message):
    joint = ", " if message.startswith("line") else ": "
    found = explain_constraint(error, Constraint(lark="start: A\nA: b"))
    assert found == FieldError("constraint.lark", f"constraint.lark{joint}{message}")


@all_cases(
    "error",
    [
        "parser error: Too many items (limit 20000; ff_tokens); try avoiding single-byte/short lexemes\n<non-verbose/>",
        "Parser Error: Current row has 4501 items; max is 2000; consider making your grammar left-recursive",
        "lexer error: too many expressions constructed\n<non-verbose/>",
        "fuel exhausted when checking relevance of lexemes (500000)",
        "too much memory or time",
    ],
)
def test_every_limit_has_the_same_words(error):
    found = explain_constraint(error, Constraint(json_object=True))
    assert found.message.startswith("constraint.json_object: it is too complex; use fewer")
    assert explain(error).startswith("it is too complex")


def test_a_long_message_is_cut():
    error = SCHEMA.format("Invalid type: " + "x" * 1000)
    assert len(explain_constraint(error, Constraint(json_schema={"type": "x" * 1000})).message) == 300
