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
    "test_infill": "`/infill`: needs a model that was trained to fill in, which the embedded one was not",
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

REASONS: Final[tuple[tuple[str, str, str], ...]] = (
    ("", r"'' is None", 'the first chunk of a stream has `content: ""`, as in OpenAI\'s API, and not null'),
    ("", "exceed_context_size_error", "the error has the type and code of OpenAI's API, `context_length_exceeded`"),
    ("test_metrics_prometheus_format", "n_tokens_max", "`n_tokens_max`, the longest sequence so far, is not measured"),
    ("test_metrics_embedding_prompt", "0.0 > 0", "`n_decode_total` does not count steps that embed texts"),
    ("test_server_slots", "200 == 501", "`/slots` cannot be turned off: it has nothing of other people's requests"),
    (
        "test_cors_options",
        "Access-Control-Allow-Credentials",
        "no cookie is a key here, and `*` with credentials would lend those of a proxy in front to all pages",
    ),
    (
        "test_cors_options",
        "'Authorization' == '\\*'",
        "the headers that the page asks for: in browsers, `*` does not include Authorization",
    ),
    (
        "test_responses_stream_with_llama_telemetry",
        "None is not None",
        "an answer that was cut ends with `response.incomplete`, as in OpenAI's API",
    ),
    ("assistant_prefill", "False", "parts of a text are joined without line breaks between them"),
    ("test_metrics_disabled", "200 == 501", "`/metrics` cannot be turned off"),
    ("test_no_ui", "", "the dashboard cannot be turned off"),
    ("test_invalid_chat_completion_req", "200 == 400", "two messages of the assistant in a row are allowed"),
    ("test_anthropic.*(image|vision)", "400 == 500", "an image is refused with 400, as a fault of the request"),
    ("test_anthropic_empty_messages", "400 == 200", "an empty list of messages is refused, as in Anthropic's API"),
    ("test_n_probs_post_sampling", "'prob'", "probabilities after sampling are not computed"),
    ("test_embedding_error_prompt_too_long", "200 != 200", "texts may have up to 8,192 tokens (`embedding_ctx`)"),
    ("test_access_static_assets", "sw.js|Expected 200 for", "the dashboard has other files"),
    ("", "non empty content delta", 'the first chunk of a stream has `content: ""`, as in OpenAI\'s API'),
)
"""Patterns of a test and of its failure, and the reason."""
