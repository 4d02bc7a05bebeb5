"""All endpoints of the native API."""

from __future__ import annotations

from typing import Final

from uma_trio.gateway.dialects.native import generate, peers, sessions
from uma_trio.gateway.endpoint import Endpoint

ENDPOINTS: Final[tuple[Endpoint, ...]] = (*generate.ENDPOINTS, *sessions.ENDPOINTS, *peers.ENDPOINTS)
