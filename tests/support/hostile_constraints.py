"""Constraints that no client should send: large, deep, ambiguous, empty, circular, or no constraint at all."""

from __future__ import annotations

from typing import Any, Final

import attrs

SIZE: Final = 64 * 1024


@attrs.frozen
class HostileConstraint:
    """A constraint of a client that means harm, or knows no better."""

    name: str
    constraint: dict[str, Any]

    def __str__(self) -> str:
        return self.name


def _schema(name: str, schema: dict[str, Any]) -> HostileConstraint:
    return HostileConstraint(f"schema: {name}", {"json_schema": schema})


def _regex(name: str, regex: str) -> HostileConstraint:
    return HostileConstraint(f"regex: {name}", {"regex": regex})


def _lark(name: str, lark: str) -> HostileConstraint:
    return HostileConstraint(f"lark: {name}", {"lark": lark})


def _gbnf(name: str, gbnf: str) -> HostileConstraint:
    return HostileConstraint(f"gbnf: {name}", {"gbnf": gbnf})


def _filled(first: str, item: str, last: str = "", joint: str = "") -> str:
    """As many ``item`` as there is room for."""
    room = SIZE - len(first.encode()) - len(last.encode())
    n = room // len((item + joint).encode())
    return first + joint.join([item] * n) + last


def nested(depth: int, key: str = "items") -> dict[str, Any]:
    """A schema inside a schema, ``depth`` times."""
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema} if key == "items" else {key: [schema]}
    return schema


def _object(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False}
    return schema


def _doubling(depth: int) -> dict[str, Any]:
    """Each definition uses the next one twice: 2 to the power of ``depth`` leaves."""
    definitions: dict[str, Any] = {
        f"d{n}": {
            "type": "object",
            "properties": {"a": {"$ref": f"#/$defs/d{n + 1}"}, "b": {"$ref": f"#/$defs/d{n + 1}"}},
            "required": ["a", "b"],
        }
        for n in range(depth)
    }
    definitions[f"d{depth}"] = {"type": "integer"}
    return {"$defs": definitions, "$ref": "#/$defs/d0"}


def _crossed(n: int) -> dict[str, Any]:
    """Each part of an ``allOf`` has alternatives: 2 to the power of ``n`` combinations."""
    return {
        "allOf": [
            {"anyOf": [{"properties": {f"a{i}": {"type": "string"}}}, {"properties": {f"b{i}": {"type": "integer"}}}]}
            for i in range(n)
        ]
    }


SCHEMAS: Final = (
    _schema("many properties", {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(2700)}}),
    _schema(
        "many required properties",
        {
            "type": "object",
            "properties": {f"p{n}": {"type": "integer"} for n in range(1500)},
            "required": [f"p{n}" for n in range(1500)],
        },
    ),
    _schema("many optional properties without type", {"properties": {f"p{n}": {} for n in range(5000)}}),
    _schema("many alternatives", {"anyOf": [{"const": f"{n}"} for n in range(3500)]}),
    _schema("many alternative objects", {"anyOf": [{"properties": {f"k{n}": {"type": "integer"}}} for n in range(1200)]}),
    _schema("many oneOf", {"oneOf": [{"type": "string", "minLength": n, "maxLength": n} for n in range(800)]}),
    _schema("a large enum", {"enum": [f"value {n}" for n in range(4500)]}),
    _schema("a large enum of numbers", {"enum": list(range(9000))}),
    _schema("one long constant", {"const": "x" * 64_000}),
    _schema("one long key", {"properties": {"k" * 64_000: {"type": "string"}}, "required": ["k" * 64_000]}),
    _schema("a long string", {"type": "string", "minLength": 100_000, "maxLength": 100_000}),
    _schema("a string of 2^31", {"type": "string", "minLength": 2**31, "maxLength": 2**31}),
    _schema("a string of 2^64", {"type": "string", "maxLength": 2**64}),
    _schema("a long array", {"type": "array", "items": {"type": "integer"}, "minItems": 100_000}),
    _schema("an array of 2^40", {"type": "array", "items": {"type": "integer"}, "minItems": 2**40, "maxItems": 2**41}),
    _schema("an array of long arrays", {"type": "array", "minItems": 1000, "items": nested(3) | {"minItems": 1000}}),
    _schema("prefixItems", {"type": "array", "prefixItems": [{"type": "integer"}] * 3800}),
    _schema("deep arrays", nested(400)),
    _schema("deep objects", _object(200)),
    _schema("deep anyOf", nested(1000, "anyOf")),
    _schema("deep allOf", nested(1000, "allOf")),
    _schema("doubling references", _doubling(30)),
    _schema("doubling references, 300", _doubling(300)),
    _schema("crossed alternatives", _crossed(12)),
    _schema("crossed alternatives, 24", _crossed(24)),
    _schema("crossed alternatives, 500", _crossed(500)),
    _schema("a reference to itself", {"$ref": "#"}),
    _schema("references in a circle", {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
    _schema("a required circle", {"$defs": {"a": {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"]}}, "$ref": "#/$defs/a"}),
    _schema("anyOf of itself", {"anyOf": [{"$ref": "#"}, {"type": "null"}]}),
    _schema("allOf of itself", {"allOf": [{"$ref": "#"}, {"type": "null"}]}),
    _schema("a reference to http", {"$ref": "http://example.com/schema.json"}),
    _schema("a reference to a file", {"$ref": "file:///etc/passwd"}),
    _schema("a reference to nothing", {"$ref": "#/$defs/nothing"}),
    _schema("a reference with an id", {"$id": "http://example.com/a", "$ref": "http://example.com/a"}),
    _schema("$dynamicRef", {"$dynamicRef": "#a"}),
    _schema("true inside", {"type": "object", "properties": {"a": True, "b": False}}),
    _schema("false required", {"type": "object", "properties": {"a": False}, "required": ["a"]}),
    _schema("nothing is allowed", {"type": "integer", "minimum": 3, "maximum": 2}),
    _schema("no number between", {"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 2}),
    _schema("an empty enum", {"enum": []}),
    _schema("an empty anyOf", {"anyOf": []}),
    _schema("empty types", {"type": []}),
    _schema("numbers beyond 2^64", {"type": "integer", "minimum": 2**70, "maximum": 2**80}),
    _schema("large numbers", {"type": "integer", "minimum": -(2**53), "maximum": 2**53}),
    _schema("a number of 300 digits", {"type": "number", "minimum": 1e300, "maximum": 1.7e308}),
    _schema("a tiny number", {"type": "number", "minimum": 1e-300, "maximum": 2e-300}),
    _schema("multipleOf", {"type": "integer", "multipleOf": 1_000_003}),
    _schema("multipleOf many", {"allOf": [{"type": "integer", "multipleOf": n} for n in (9973, 9967, 9949)]}),
    _schema("multipleOf 0", {"type": "integer", "multipleOf": 0}),
    _schema("multipleOf 1e-30", {"type": "number", "multipleOf": 1e-30}),
    _schema("a catastrophic pattern", {"type": "string", "pattern": "^(a+)+$"}),
    _schema("a counting pattern", {"type": "string", "pattern": "(a|b)*a(a|b){20}"}),
    _schema("a pattern with look-around", {"type": "string", "pattern": "^(?!a).*$"}),
    _schema("many patterns", {"allOf": [{"type": "string", "pattern": f"a{{{n}}}"} for n in range(2, 200)]}),
    _schema("many patternProperties", {"patternProperties": {f"^x{n}": {"type": "integer"} for n in range(1000)}}),
    _schema("NUL and surrogate-like keys", {"properties": {"\0": {"const": "\0"}, "\uffff": {"const": "\x1b"}}}),
    _schema("a keyword that is not supported", {"type": "object", "unevaluatedProperties": False}),
    _schema("uniqueItems", {"type": "array", "uniqueItems": True, "items": {"type": "integer"}}),
    _schema("if and then", {"if": {"type": "string"}, "then": {"minLength": 2}}),
    _schema("an x-guidance of its own", {"type": "object", "x-guidance": {"whitespace_pattern": "[ \\n]{0,100000}"}}),
    _schema("an inner x-guidance", {"properties": {"a": {"x-guidance": {"lenient": True}, "not": {}}}}),
    _schema("an unknown format", {"type": "string", "format": "nothing"}),
)  # fmt: skip

REGEXES: Final = (
    _regex("nested repetition", "(((a{1000}){1000}){1000}){1000}"),
    _regex("a long repetition", "a{100000}"),
    _regex("an optional repetition", "(a?){30000}"),
    _regex("optional and required", "(a?){3000}a{3000}"),
    _regex("a bounded repetition of classes", r"(\w{1,500}\s){1,500}"),
    _regex("catastrophic", "((a+)+)+b"),
    _regex("catastrophic alternatives", "(a|a|aa)*(a|aa|a)*b"),
    _regex("counting from behind", "(a|b)*a(a|b){24}"),
    _regex("counting words from behind", r"(.|\n)*x(.|\n){60}"),
    _regex("intersection of counts", "((.*a.{14}b)|(.*b.{15}c)|(.*c.{16}d))*"),
    _regex("64 KiB of alternatives", _filled("(", "ab", ")", "|")),
    _regex("64 KiB of different alternatives", "(" + "|".join([f"w{n}" for n in range(9800)]) + ")"),
    _regex("64 KiB of unions", _filled("", "(a|b)?")),
    _regex("64 KiB of stars", _filled("", "a*")),
    _regex("64 KiB of stars of alternatives", _filled("", "(a|b)*c?")),
    _regex("64 KiB of groups", "(" * 32_000 + "a" + ")" * 32_000),
    _regex("1,000 groups", "(" * 1000 + "a" + ")" * 1000),
    _regex("64 KiB of starred groups", "(" * 20_000 + "a" + ")*" * 20_000),
    _regex("200 starred groups", "(" * 200 + "a" + ")*" * 200),
    _regex("64 KiB of classes", _filled("", r"\p{L}")),
    _regex("64 KiB of negated classes", _filled("", r"\PL*")),
    _regex("64 KiB of text", "a" * 65_000),
    _regex("64 KiB of one letter in ten", "".join([chr(97 + n % 10) for n in range(65_000)])),
    _regex("classes of all kinds", r"(\w|\d|\s|\W|\D|\S){1,2000}"),
    _regex("a reversed bound", "a{3,2}"),
    _regex("a bound beyond 2^32", "a{4294967296}"),
    _regex("a bound beyond 2^64", "a{99999999999999999999}"),
    _regex("the empty language", "[^\\s\\S]"),
    _regex("the empty text alone", "()"),
    _regex("anchors", "^a$"),
    _regex("a back-reference", r"(a)\1"),
    _regex("a look-ahead", "(?=a)b"),
    _regex("a look-behind", "(?<=a)b"),
    _regex("a word boundary", r"\ba\b"),
    _regex("an open class", "[a-"),
    _regex("a reversed class", "[z-a]"),
    _regex("an unknown class", r"\p{Nothing}"),
    _regex("a NUL", "a\0b"),
    _regex("a slash and line breaks", "a/b\n\\/\\\n"),
    _regex("an end of the literal", "a/ | /b"),
    _regex("bytes", r"(?-u:\xff)+"),
    _regex("flags", "(?i)straße"),
    _regex("a comment", "(?x) a b # c"),
)

CHOICES: Final = (
    HostileConstraint("choice: 512 long ones", {"choice": [f"{n:04}" + "x" * 100 for n in range(512)]}),
    HostileConstraint("choice: prefixes of each other", {"choice": ["a" * n for n in range(1, 340)]}),
    HostileConstraint("choice: the same", {"choice": ["a"] * 512}),
    HostileConstraint("choice: control characters", {"choice": ["\0", "\x1b[2J", '"', "\\", "\n", "\u2028", "/"]}),
    HostileConstraint("choice: a control token", {"choice": ["<|im_end|>", "<[0]>", "</s>"]}),
    HostileConstraint("choice: a format character", {"choice": ["%s %json {}", "start: x", "{n}"]}),
)

GRAMMARS: Final = (
    _lark("left recursion", "start: start /a/ | /b/"),
    _lark("only left recursion", "start: start"),
    _lark("infinite ambiguity", "start: start start | /a/ | /b/?"),
    _lark("infinite ambiguity of empty rules", "start: a*\na: b*\nb: start*\n"),
    _lark("no end", "start: /a/ start"),
    _lark("an ambiguous expression", 'start: e\ne: e e | e "+" e | "a" | "a" "a"'),
    _lark("doubling rules", "start: r0\n" + "".join([f"r{n}: r{n + 1} r{n + 1}\n" for n in range(40)]) + "r40: /a/"),
    _lark("doubling terminals", "start: R0\n" + "".join([f"R{n}: R{n + 1} R{n + 1}\n" for n in range(40)]) + "R40: /a/"),
    _lark("doubling alternatives", "start: R0\n" + "".join([f"R{n}: (R{n + 1}|/x{n}/) (R{n + 1}|/y{n}/)\n" for n in range(24)]) + "R24: /a/"),
    _lark("many rules", "start: r0\n" + "".join([f"r{n}: /a{n}/ r{n + 1}\n" for n in range(2800)]) + "r2800: /a/"),
    _lark("many alternatives", "start: " + " | ".join([f"/a{n}b*/" for n in range(4500)])),
    _lark("many terminals with one beginning", "start: (" + " | ".join([f"/[a-z]{{1,{n}}}/" for n in range(1, 2500)]) + ")*"),
    _lark("many rules with one beginning", "start: " + " | ".join([f"r{n}" for n in range(1500)]) + "\n" + "".join([f"r{n}: /[a-z]+/ r{n}? /{n}/\n" for n in range(1500)])),
    _lark("a large repetition", "start: (/a/ /b/?){100000}"),
    _lark("nested repetition", "start: (((/a/ /b/){1000}){1000}){1000}"),
    _lark("a repetition of a rule", "start: a{0,50000}\na: /x/ | /y/ a"),
    _lark("deep parentheses", "start: " + "(" * 20_000 + "/a/" + ")" * 20_000),
    _lark("1,000 parentheses", "start: " + "(" * 1000 + "/a/" + ")" * 1000),
    _lark("%ignore", "start: /a/ /b/\n%ignore / +/"),
    _lark("%ignore of everything", "start: /a/\n%ignore /(.|\\n)*/"),
    _lark("%import", "%import common.INT\nstart: INT"),
    _lark("%import of a file", "%import .secret.X\nstart: X"),
    _lark("%import of a path", "%import ../../etc/passwd\nstart: X"),
    _lark("%llguidance", '%llguidance {"no_forcing": true, "allow_invalid_utf8": true}\nstart: /a+/'),
    _lark("%llguidance that is not", "%llguidance {\nstart: /a+/"),
    _lark("%json", 'start: "x" %json {"type": "integer", "minimum": 3}'),
    _lark("%json with a reference", 'start: %json {"$ref": "http://example.com"}'),
    _lark("%json with crossed alternatives", 'start: %json {"allOf": [' + ",".join(['{"anyOf":[{"minLength":1},{"minimum":1}]}'] * 20) + "]}"),
    _lark("%regex", 'start: %regex {"substring_words": "a b c d"}'),
    _lark("%regex of a long text", "start: %regex {\"substring_chars\": \"" + "abcd efgh " * 6400 + "\"}"),
    _lark("%lark nested", "start: %lark {\nstart: %lark {\nstart: /a/\n}\n}"),
    _lark("%declare and %override", "%declare X\n%override start: /a/\nstart: X"),
    _lark("a control token", "start: <[0]> /a/"),
    _lark("a token beyond the vocabulary", "start: <[99999999]>"),
    _lark("all tokens", "start: <[0-100]>+"),
    _lark("tokens negated", "start: <[^0-10]>+"),
    _lark("a named token", "start: <|im_end|> /a/"),
    _lark("a named token that is none", "start: <|nothing|>"),
    _lark("a reference to another grammar", "start: @other"),
    _lark("a huge budget", "start[max_tokens=4294967296]: /a*/"),
    _lark("a temperature", "start[temperature=100]: /a*/"),
    _lark("a capture", "start[capture]: /a*/"),
    _lark("a lazy terminal", "start[lazy]: /a*/"),
    _lark("a stop", 'start[stop="x"]: /(.|\\n)*/'),
    _lark("nothing", "\n"),
    _lark("no rule", "# comment"),
    _lark("NUL", "start: /a/\0"),
    _lark("a parametric rule", "start: p::0x0\np::_: /a/ p::incr(_) | /b/"),
    _lark("as JSON", '{"grammars": [{"lark_grammar": "start: /a/"}]}'),
    _gbnf("left recursion", 'root ::= root "a" | "b"'),
    _gbnf("no end", 'root ::= "a" root'),
    _gbnf("infinite ambiguity", 'root ::= root root | ""'),
    _gbnf("a missing rule", "root ::= nothing"),
    _gbnf("deep parentheses", "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000),
    _gbnf("500 parentheses", "root ::= " + "(" * 500 + '"a"' + ")" * 500),
    _gbnf("a large repetition", 'root ::= ("a" "b"?){100000}'),
    _gbnf("nested repetition", 'root ::= ((("a"|"b"){1000}){1000}){1000}'),
    _gbnf("many alternatives", "root ::= " + " | ".join([f'"a{n}"' for n in range(6000)])),
    _gbnf("many rules", "".join([f'r{n} ::= "a" r{n + 1}\n' for n in range(3000)]) + 'r3000 ::= "b"\nroot ::= r0'),
    _gbnf("doubling rules", "".join([f"r{n} ::= r{n + 1} r{n + 1}\n" for n in range(40)]) + 'r40 ::= "a"\nroot ::= r0'),
    _gbnf("64 KiB of classes", _filled("root ::= ", "[a-z]+ ")),
    _gbnf("64 KiB of quotes", "root ::= " + '"' * 60_000),
    _gbnf("64 KiB of spaces", "root ::= " + " " * 60_000 + '"a"'),
    _gbnf("NUL", 'root ::= "a\0b"'),
    _gbnf("an escape", 'root ::= "\\x00\\uD800\\u0041"'),
    _gbnf("a directive of Lark", 'root ::= "a"\n%import common.INT'),
)  # fmt: skip

ALL: Final = (*SCHEMAS, *REGEXES, *CHOICES, *GRAMMARS)
