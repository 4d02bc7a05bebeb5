"""Why uma-trio does not pass some of llama.cpp's tests of llama-server."""

from __future__ import annotations

from typing import Final

OFFERED: Final = (
    "test_basic",
    "test_chat_completion",
    "test_compat_anthropic",
    "test_compat_oai_responses",
    "test_completion",
    "test_ctx_shift",
    "test_embedding",
    "test_ignore_eos",
    "test_metrics",
    "test_security",
    "test_template",
    "test_tokenize",
    "test_tool_call",
)
"""Files of tests for endpoints that the gateway has."""

NOT_OFFERED: Final = {
    "test_compat_gcp": "`/predict` of Vertex AI",
    "test_infill": "`/infill`: needs a model that was trained to fill in",
    "test_kv_keep_only_active": "slots that are saved when idle; here sessions are offloaded",
    "test_lora": "LoRA adapters",
    "test_mcp_servers": "MCP: the client runs tools",
    "test_proxy": "a proxy for MCP",
    "test_rerank": "reranking",
    "test_router": "models that are loaded and unloaded on request",
    "test_sleep": "unloading the model of an idle server",
    "test_slot_save": "files of slots; here sessions are kept on disk",
    "test_speculative": "draft models; speculation here uses the prompt, and needs no flag",
    "test_stream": "streams that a client can resume after it has left: here a client that leaves cancels",
    "test_tools_builtin": "tools that the server runs",
    "test_vision_api": "images",
}
"""Files of tests for something else, and what."""

REASONS: Final[tuple[tuple[str, str, str], ...]] = ()
"""Patterns of a test and of its failure, and the reason."""
