"""Times in answers."""

from __future__ import annotations

import datetime


def iso_time(seconds: float | None = None) -> str:
    """A time as Ollama and Anthropic write it, from Unix seconds; now, if none are given."""
    when = (
        datetime.datetime.now(datetime.UTC)
        if seconds is None
        else datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    )
    return when.isoformat().replace("+00:00", "Z")
