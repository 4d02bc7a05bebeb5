"""The HTTP gateway: an ASGI application that is a client of the daemon's socket.

``uma-trio serve --http 8080`` runs it under uvicorn, in a process of its own.  Another ASGI server can run it as well, as
``uma_trio.gateway:app``; it then takes its settings from the ``UMA_*`` variables.

Each folder of ``dialects`` is an API that clients speak.  It translates a request to one of the socket protocol, and the
events of the answer back.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import os

    from uma_trio import config
    from uma_trio.gateway.application import make_app

    return make_app(config.load(environment=os.environ))
