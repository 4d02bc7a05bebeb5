"""All endpoints of Anthropic's API."""

from __future__ import annotations

from typing import Final

from uma_trio.gateway.dialects.anthropic import messages, models
from uma_trio.gateway.endpoint import Endpoint

ENDPOINTS: Final[tuple[Endpoint, ...]] = (*messages.ENDPOINTS, *models.ENDPOINTS)
