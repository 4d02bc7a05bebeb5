"""All endpoints of Ollama's API."""

from __future__ import annotations

from typing import Final

from uma_trio.gateway.dialects.ollama import embed, generate, library, models
from uma_trio.gateway.endpoint import Endpoint

ENDPOINTS: Final[tuple[Endpoint, ...]] = (
    *generate.ENDPOINTS,
    *embed.ENDPOINTS,
    *models.ENDPOINTS,
    *library.ENDPOINTS,
)
