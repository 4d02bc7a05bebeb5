"""What an answer must look like, in the words of OpenAI's API, of vLLM and of llama-server."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from uma_trio.gateway.errors import invalid

CONSTRAINT_NAMES: Final = {
    "constraint": ("response_format", "structured_outputs", "json_schema", "grammar", "text.format"),
    "constraint.json_schema": (
        "response_format",
        "structured_outputs.json",
        "guided_json",
        "json_schema",
        "text.format",
    ),
    "constraint.json_object": ("response_format", "structured_outputs.json_object"),
    "constraint.regex": ("structured_outputs.regex", "guided_regex"),
    "constraint.choice": ("structured_outputs.choice", "guided_choice"),
    "constraint.gbnf": ("structured_outputs.grammar", "guided_grammar", "grammar"),
}
"""Where the constraint of the socket protocol comes from."""


class ResponseFormat(msgspec.Struct):
    """OpenAI's ``response_format``."""

    type: str
    json_schema: dict[str, Any] | None = None
    schema: dict[str, Any] | None = None
    """llama-server's place for the schema of a ``json_object``."""


class StructuredOutputs(msgspec.Struct):
    """vLLM's ``structured_outputs``."""

    json: dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class Constrained(msgspec.Struct, kw_only=True):
    """Fields of a request that constrain its answer.  At most one is set."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | None = None
    """This and the next three: vLLM's earlier names."""
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    """llama-server's."""
    grammar: str | None = None
    """llama-server's: GBNF."""

    @property
    def constraint(self) -> dict[str, Any] | None:
        """The constraint of the socket protocol.

        Raises:
            HttpError: there are several, or the format is not known.
        """
        outputs = self.structured_outputs or StructuredOutputs()
        wanted = [
            ("response_format", constraint_of_format(self.response_format)),
            ("structured_outputs", _one("json_schema", outputs.json)),
            ("structured_outputs", _one("regex", outputs.regex)),
            ("structured_outputs", _one("choice", outputs.choice)),
            ("structured_outputs", _one("gbnf", outputs.grammar)),
            ("structured_outputs", _one("json_object", outputs.json_object or None)),
            ("guided_json", _one("json_schema", self.guided_json)),
            ("guided_regex", _one("regex", self.guided_regex)),
            ("guided_choice", _one("choice", self.guided_choice)),
            ("guided_grammar", _one("gbnf", self.guided_grammar)),
            ("json_schema", _one("json_schema", self.json_schema)),
            ("grammar", _one("gbnf", self.grammar or None)),
        ]
        given = [(name, constraint) for name, constraint in wanted if constraint is not None]
        if len(given) > 1:
            names = " and ".join(name for name, _ in given)
            raise invalid(f"{names} both constrain the answer; send one", parameter=given[1][0])
        return given[0][1] if given else None


def _one(kind: str, value: Any) -> dict[str, Any] | None:
    return None if value is None else {kind: value}


def constraint_of_format(wanted: ResponseFormat | None) -> dict[str, Any] | None:
    """The constraint of the socket protocol for a format.

    Raises:
        HttpError: the format is not known.
    """
    match wanted:
        case None | ResponseFormat(type="text"):
            return None
        case ResponseFormat(type="json_object", schema=None):
            return {"json_object": True}
        case ResponseFormat(type="json_object", schema=dict() as schema):
            return {"json_schema": schema}
        case ResponseFormat(type="json_schema", json_schema={"schema": dict() as schema}):
            return {"json_schema": schema}
    raise invalid(
        "response_format must be {'type': 'text'}, {'type': 'json_object'} or {'type': 'json_schema', 'json_schema': "
        "{'schema': ...}}",
        parameter="response_format",
    )
