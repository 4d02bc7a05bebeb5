"""All endpoints of OpenAI's API, and of the servers that have it."""

from __future__ import annotations

from typing import Final

import attrs

from uma_trio.gateway.dialects.openai import (
    batches,
    chat,
    completions,
    embeddings,
    files,
    llama_server,
    local_servers,
    models,
    rerank,
    responses,
    routers,
    tokenizer_file,
    transcriptions,
)
from uma_trio.gateway.endpoint import Endpoint

WITHOUT_VERSION: Final = tuple(
    attrs.evolve(endpoint, path=endpoint.path.removeprefix("/v1"), is_batched=False)
    for endpoint in (*chat.ENDPOINTS, *models.ENDPOINTS, *responses.ENDPOINTS)
)
"""llama-server has these paths without ``/v1`` too."""

ENDPOINTS: Final[tuple[Endpoint, ...]] = (
    *chat.ENDPOINTS,
    *completions.ENDPOINTS,
    *embeddings.ENDPOINTS,
    *rerank.ENDPOINTS,
    *models.ENDPOINTS,
    *responses.ENDPOINTS,
    *files.ENDPOINTS,
    *transcriptions.ENDPOINTS,
    *batches.ENDPOINTS,
    *local_servers.ENDPOINTS,
    *routers.ENDPOINTS,
    *tokenizer_file.ENDPOINTS,
    *llama_server.ENDPOINTS,
    *WITHOUT_VERSION,
)
