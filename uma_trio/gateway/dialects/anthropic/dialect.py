"""What is special in Anthropic's API: its errors and its names of fields."""

from __future__ import annotations

from typing import Any, Final

from uma_trio.errors import ContextTooSmall, PromptTooLarge
from uma_trio.gateway.dialects.common.fields import names_of
from uma_trio.gateway.endpoint import Dialect
from uma_trio.gateway.errors import HttpError

VERSION_HEADER: Final = "anthropic-version"
"""All clients of Anthropic's API send it.  Where two APIs have the same path, it says which one is meant."""

ERROR_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


TOO_LONG: Final = (PromptTooLarge.code, ContextTooSmall.code)
"""Clients that summarise a chat which has become too long look for these words of Anthropic's API."""

FIELD_NAMES: Final = {
    **names_of("anthropic"),
    "constraint": ("output_config", "output_format"),
    "constraint.json_schema": ("output_config", "output_format"),
    "chat_template_kwargs": ("thinking", "output_config"),
    "reasoning_budget": "thinking.budget_tokens",
    "tools[].parameters": "tools[].input_schema",
}
"""What fields of the socket protocol are called in Anthropic's API."""


def error_body(error: HttpError, request_id: str) -> dict[str, Any]:
    """The body of an error response, and the data of an error in a stream."""
    kind = ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    place = error.parameter
    message = error.message if place is None or place in error.message else f"{place}: {error.message}"
    if error.code in TOO_LONG:
        message = f"prompt is too long: {message.removeprefix('messages: ')}"
    return {
        "type": "error",
        "error": {"type": kind, "message": message, "code": error.code},
        "request_id": request_id,
    }


ANTHROPIC: Final = Dialect("anthropic", "Anthropic", error_body, FIELD_NAMES, header=VERSION_HEADER)
