"""What is special in the native API: its errors.  Its fields are those of the socket protocol."""

from __future__ import annotations

from typing import Any, Final

from uma_trio.gateway.endpoint import Dialect
from uma_trio.gateway.errors import HttpError


def error_body(error: HttpError, request_id: str) -> dict[str, Any]:
    body = {"code": error.code, "message": error.message, "request_id": request_id}
    return {"error": {**body, "retry_after_ms": error.retry_after_ms} if error.retry_after_ms is not None else body}


NATIVE: Final = Dialect("starling", "uma-trio", error_body)
"""Logs, metrics and traces call it ``starling``."""
