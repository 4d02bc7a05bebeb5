"""All endpoints of AICI's API."""

from __future__ import annotations

from typing import Final

from uma_trio.gateway.dialects.aici import controllers, runs
from uma_trio.gateway.endpoint import Endpoint

ENDPOINTS: Final[tuple[Endpoint, ...]] = (*controllers.ENDPOINTS, *runs.ENDPOINTS)
