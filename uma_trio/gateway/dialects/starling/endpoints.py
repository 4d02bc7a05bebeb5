"""All endpoints of Starling's API."""

from __future__ import annotations

from typing import Final

from uma_trio.gateway.dialects.starling import generate, peers, sessions
from uma_trio.gateway.endpoint import Endpoint

ENDPOINTS: Final[tuple[Endpoint, ...]] = (*generate.ENDPOINTS, *sessions.ENDPOINTS, *peers.ENDPOINTS)
