"""uma-trio: an LLM daemon over llama.cpp whose streams never freeze.

``ask``, ``stream``, ``run``, ``open_client`` and ``Answer`` are those of ``uma_trio.client``, which is imported when one of them
is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from uma_trio.client import Answer, ask, open_client, run, stream

__all__ = ["Answer", "ask", "open_client", "run", "stream"]
__version__ = "0.1.0"


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from uma_trio import client

    return getattr(client, name)
