"""docs/HTTP.md names every endpoint, every field of a request, every header and every error code of the gateway.

python tests/pure/test_http_docs.py    writes the table of fields
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Set
from pathlib import Path

import msgspec

from tests.support.cases import all_cases
from uma_trio.gateway import errors
from uma_trio.gateway.application import ENDPOINTS
from uma_trio.gateway.endpoint import Endpoint
from uma_trio.protocol.parameters import PARAMETERS

PAGE = Path(__file__).parents[2] / "docs" / "HTTP.md"
GATEWAY = Path(__file__).parents[2] / "uma_trio" / "gateway"
BEGIN, END = "| endpoint | fields |\n|---|---|\n", "\n"
OF_ANY_SERVER = {"content-length", "content-type", "host", "origin", "expect", "connection", "accept", "vary", "allow"}
"""Headers whose meaning is that of HTTP."""


def fields_of(endpoint: Endpoint) -> list[str]:
    """Names of the fields of a request."""
    info = msgspec.inspect.type_info(endpoint.body)  # type: ignore[arg-type]
    assert isinstance(info, msgspec.inspect.StructType | msgspec.inspect.DataclassType)
    return sorted({field.encode_name for field in info.fields} - endpoint.hidden_fields)


def rows() -> Iterator[str]:
    """One row for endpoints with the same fields; what those of ``OPENAI`` have in common is a row of its own."""
    found: dict[frozenset[str], list[str]] = {}
    for endpoint in ENDPOINTS:
        if endpoint.body is not None and endpoint.path.startswith(("/v1/", "/api/")) | (endpoint.path in ALONE):
            found.setdefault(frozenset(fields_of(endpoint)), []).append(f"`{endpoint.path}`")
    common = frozenset.intersection(*(names for names, paths in found.items() if {*paths} & OPENAI))
    yield f"| *common* | {listed(common)} |\n"
    for names, paths in found.items():
        shown = f"*common*, {listed(names - common)}" if common <= names else listed(names)
        yield f"| {', '.join(paths)} | {shown.removesuffix(', ')} |\n"


def listed(names: Set[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in sorted(names - SAMPLING))
    return (
        f"{shown}, {LINK}"
        if len(names & SAMPLING) > OF_OTHER_APIS
        else ", ".join(f"`{name}`" for name in sorted(names))
    )


OPENAI = {"`/v1/chat/completions`", "`/v1/completions`", "`/completion`"}
"""APIs of one family, with many fields."""

SAMPLING = {name for row in PARAMETERS for name in row.names_in("openai")}
OF_OTHER_APIS = 3
"""Fields of an API that has no more sampling parameters than these."""
LINK = "[sampling parameters](PROTOCOL-REFERENCE.md#sampling-parameters)"

ALONE = ("/tokenize", "/detokenize", "/apply-template", "/completion", "/v2/rerank")
"""Paths without ``/v1`` that no other path stands for."""


def with_table(page: str) -> str:
    before, after = page.split(BEGIN)
    return before + BEGIN + "".join(rows()) + END + after.partition("\n\n")[2]


def test_the_table_of_fields_is_that_of_the_code() -> None:
    assert with_table(PAGE.read_text()) == PAGE.read_text(), "run python tests/pure/test_http_docs.py"


@all_cases("endpoint", ENDPOINTS)
def test_every_endpoint_is_named(endpoint: Endpoint) -> None:
    path = endpoint.path.replace("{name:path}", "NAME")
    shown = PAGE.read_text()
    assert any(f"`{name}`" in shown for each in (path, f"/v1{path}") for name in (each, f"{endpoint.method} {each}"))


def test_the_table_of_errors_has_the_codes_and_the_statuses_of_the_code() -> None:
    kinds = errors.OWN_KINDS
    used = {(each.code, each.http_status) for each in kinds if each is not errors.CLIENT_LEFT}
    named = set()
    for codes, statuses in re.findall(
        r"^\| (`E_GATEWAY_\w+`(?:, `E_GATEWAY_\w+`)*) \| ([\d, ]+) \|", PAGE.read_text(), re.M
    ):
        for code in codes.split(", "):
            named |= {(code.strip("`"), int(status)) for status in statuses.split(", ")}
    assert named == used, "CLIENT_LEFT is for logs: nobody gets it"


def test_every_header_is_named() -> None:
    text = "".join(file.read_text().lower() for file in GATEWAY.rglob("*.py"))
    used = set(re.findall(r'"((?:x-|api-|retry-|anthropic-|request-id|authorization|traceparent)[a-z-]*)"', text))
    used -= {"x-event-schema", "x-accel-buffering", "x-content-type-options"}
    shown = PAGE.read_text().lower()
    missing = [name for name in used if name not in shown and name.rpartition("-")[0] not in shown]
    assert not missing


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
