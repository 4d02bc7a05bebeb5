"""What is special in OpenAI's API: its errors, and its names of fields, those of vLLM and llama-server included."""

from __future__ import annotations

from typing import Any, Final

from uma_trio.errors import BadRequest, ContextTooSmall, MaxTokensTooLarge, ModelNotFound, PromptTooLarge
from uma_trio.gateway.answer import AnswerRenderer, sse
from uma_trio.gateway.dialects.common.fields import names_of
from uma_trio.gateway.dialects.openai.constraints import CONSTRAINT_NAMES
from uma_trio.gateway.endpoint import Dialect
from uma_trio.gateway.errors import NO_KEY, NO_PATH, QUOTA, WRONG_METHOD, HttpError

INVALID_REQUEST: Final = "invalid_request_error"
"""The ``type`` of most errors that are up to the client."""

CODES: Final = {
    NO_KEY.code: "invalid_api_key",
    WRONG_METHOD.code: "method_not_supported",
    NO_PATH.code: "unknown_url",
    MaxTokensTooLarge.code: "invalid_value",
    BadRequest.code: "invalid_value",
    ContextTooSmall.code: "context_length_exceeded",
    PromptTooLarge.code: "context_length_exceeded",
    ModelNotFound.code: "model_not_found",
}
"""OpenAI's codes for our own."""


def error_type(error: HttpError) -> str:
    """The ``type`` that OpenAI's API gives such an error."""
    match error.status:
        case 401:
            return "authentication_error"
        case 403:
            return "permission_error"
        case 429:
            return "insufficient_quota" if error.kind == QUOTA else "rate_limit_error"
        case 503:
            return "service_unavailable_error"
    return INVALID_REQUEST if error.status < 500 else "server_error"


def error_code(error: HttpError) -> str:
    """The ``code`` that OpenAI's API gives such an error; our own, if it has none."""
    match error.status:
        case 429:
            return "insufficient_quota" if error.kind == QUOTA else "rate_limit_exceeded"
        case 503:
            return "server_is_overloaded"
    return CODES.get(error.code, error.code if error.status < 500 else "server_error")


def error_body(error: HttpError, request_id: str) -> dict[str, Any]:
    """The body of an error response, and the data of an error in a stream."""
    return {
        "error": {
            "message": error.message,
            "type": error_type(error),
            "param": error.parameter,
            "code": error_code(error),
            "uma_code": error.code,
            "request_id": request_id,
        }
    }


FIELD_NAMES: Final = {
    **CONSTRAINT_NAMES,
    **names_of("openai"),
    "logprobs": ("top_logprobs", "n_probs", "logprobs"),
    "session_id": ("session_id", "prompt_cache_key"),
    "infill": "suffix",
    "chat_template_kwargs": ("chat_template_kwargs", "reasoning_effort", "reasoning"),
}
"""What fields of the socket protocol are called in requests of OpenAI's API, of vLLM and of llama-server."""

OPENAI: Final = Dialect("openai", "OpenAI", error_body, FIELD_NAMES)


class OpenAIRenderer(AnswerRenderer):
    """Writes an answer whose errors have the form of OpenAI's API."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id

    def fail(self, error: HttpError) -> bytes:
        """An error in the middle of the stream."""
        return sse(error_body(error, self._request_id))
