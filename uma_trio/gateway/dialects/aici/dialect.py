"""What is special in AICI's API: its errors, which are texts."""

from __future__ import annotations

from typing import Final

from uma_trio.gateway.endpoint import Dialect

AICI: Final = Dialect("aici", "Controllers", lambda error, _: f"APIError: {error.message}")
