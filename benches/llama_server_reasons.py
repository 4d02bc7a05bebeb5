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

REASONS: Final[tuple[tuple[str, str, str], ...]] = (
    ("", "system_fingerprint|res.system_fingerprint", "`system_fingerprint` is not sent"),
    (r"openai_library$", r"None is not None", "`system_fingerprint` is not sent"),
    ("", r"'' is None", 'the first chunk of a stream has `content: ""`, as in OpenAI\'s API, and not null'),
    ("", "__verbose", "`__verbose`, the rendered prompt in an answer; `/apply-template` has it"),
    ("", "exceed_context_size_error", "the error has the type and code of OpenAI's API, `context_length_exceeded`"),
    ("", "Process-Start-Time-Unix", "`/metrics` has other names and headers; `uma_*`"),
    ("", "KeyError: 'logit_bias'", "`generation_settings` has only what the request has set"),
    ("", "KeyError: 'params'", "`/props` has the context and the template, and not all parameters"),
    ("test_server_slots", "404 == 501", "`/slots` is not offered: 404, not 501"),
    ("test_metrics_disabled", "200 == 501", "`/metrics` cannot be turned off"),
    ("test_no_ui", "", "the dashboard cannot be turned off"),
    ("test_metrics_timings_on_prompt_progress", "'timings'", "timings come with the end of an answer only"),
    ("test_chat_completion_with_timings_per_token", "", "timings come with the end of `/completion` only"),
    (
        "test_return_progress",
        "None is not None",
        "progress of the prefill: in `/completion` and the socket protocol only",
    ),
    ("test_responses_stream_with_llama_telemetry", "", "progress and timings are not part of the Responses API"),
    ("test_chat_completions_token_count", "404 == 200", "counted by `/tokenize` and `/v1/responses/input_tokens`"),
    ("continue_final_message", "200 == 400", "`continue_final_message` is not known: a warning, and no effect"),
    ("test_invalid_chat_completion_req", "200 == 400", "two messages of the assistant in a row are allowed"),
    ("test_add_generation_prompt", "", "`/apply-template` always ends with the beginning of an answer"),
    ("test_anthropic.*(image|vision)", "400 == 500", "an image is refused with 400, as a fault of the request"),
    ("test_anthropic_empty_messages", "400 == 200", "an empty list of messages is refused, as in Anthropic's API"),
    ("test_tokenize_with_pieces", "", "`with_pieces` is not known"),
    ("test_n_probs_post_sampling", "'prob'", "probabilities after sampling are not computed"),
    (
        "test_embedding_mixed_input|test_embedding_content_text",
        "400 == 200",
        "`input` has OpenAI's forms, and lists that mix them",
    ),
    ("test_embedding_error_prompt_too_long", "200 != 200", "texts may have up to 8,192 tokens (`embedding_ctx`)"),
    (
        "test_cors_o",
        "403 == 200",
        "a page of an origin that `--http-origins` does not name gets 403, and no CORS headers",
    ),
    (
        "test_cors_origins_localhost_reflects",
        "KeyError: 'Access-Control-Allow-Origin'",
        "names of headers are in lower case, and this test compares them as they are written",
    ),
    ("test_access_static_assets", "sw.js|Expected 200 for", "the dashboard has other files"),
    ("", "non empty content delta", 'the first chunk of a stream has `content: ""`, as in OpenAI\'s API'),
    (
        "test_reasoning",
        "prompt to end with",
        "`enable_thinking` is not set if the request does not set it, as in Transformers",
    ),
    ("test_date_inside_prompt", "today's date", "`date_string`, a variable of templates that only llama.cpp sets"),
    ("test_date_inside_prompt", "does not serve", "`functions` and `datetime`, variables that only llama.cpp sets"),
)
"""Patterns of a test and of its failure, and the reason."""
