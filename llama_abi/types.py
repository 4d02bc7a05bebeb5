"""Types of llama.h in its order: structs that are passed by value, typedefs, and enum values in use.

A struct must have all fields in order; ``llama_abi.check`` verifies the offset and type of each.
"""

from __future__ import annotations

from llama_abi.declarations import Declarations

C = Declarations()

# ── ggml.h, ggml-backend.h ──────────────────────────────────────────────────────────────────

LOG_LEVEL = C.enum(
    "ggml_log_level",
    """
    GGML_LOG_LEVEL_NONE  = 0,
    GGML_LOG_LEVEL_DEBUG = 1,
    GGML_LOG_LEVEL_INFO  = 2,
    GGML_LOG_LEVEL_WARN  = 3,
    GGML_LOG_LEVEL_ERROR = 4,
    GGML_LOG_LEVEL_CONT  = 5,
""",
)

KV_TYPE = C.enum(
    "ggml_type",
    """
    GGML_TYPE_F32    = 0,
    GGML_TYPE_F16    = 1,
    GGML_TYPE_Q4_0   = 2,
    GGML_TYPE_Q4_1   = 3,
    GGML_TYPE_Q5_0   = 6,
    GGML_TYPE_Q5_1   = 7,
    GGML_TYPE_Q8_0   = 8,
    GGML_TYPE_IQ4_NL = 20,
    GGML_TYPE_BF16   = 30,
""",
)

OP = C.enum(
    "ggml_op",
    """
    GGML_OP_MUL        = 7,
    GGML_OP_MUL_MAT    = 29,
    GGML_OP_MUL_MAT_ID = 30,
    GGML_OP_SCALE      = 32,
""",
)

DEVICE_TYPE = C.enum(
    "ggml_backend_dev_type",
    """
    GGML_BACKEND_DEVICE_TYPE_CPU   = 0,
    GGML_BACKEND_DEVICE_TYPE_GPU   = 1,
    GGML_BACKEND_DEVICE_TYPE_IGPU  = 2,
    GGML_BACKEND_DEVICE_TYPE_ACCEL = 3,
    GGML_BACKEND_DEVICE_TYPE_META  = 4,
""",
)

C.typedef("ggml_backend_dev_t", "struct ggml_backend_device *")
C.typedef("ggml_backend_buffer_type_t", "struct ggml_backend_buffer_type *")
C.typedef("ggml_backend_reg_t", "struct ggml_backend_reg *")
C.typedef("ggml_backend_buffer_t", "struct ggml_backend_buffer *")
ggml_log_callback = C.typedef(
    "ggml_log_callback", "void (*)(enum ggml_log_level level, const char * text, void * user_data)"
)
ggml_abort_callback = C.typedef("ggml_abort_callback", "bool (*)(void * data)")
ggml_tensor = C.struct(
    "ggml_tensor",
    """
    enum ggml_type type;
    struct ggml_backend_buffer * buffer;
    int64_t ne[4];
    size_t nb[4];
    enum ggml_op op;
    int32_t op_params[16];
    int32_t flags;
    struct ggml_tensor * src[10];
    struct ggml_tensor * view_src;
    size_t view_offs;
    void * data;
    char name[64];
    void * extra;
    char padding[8];
""",
)
ggml_backend_sched_eval_callback = C.typedef(
    "ggml_backend_sched_eval_callback", "bool (*)(struct ggml_tensor * t, bool ask, void * user_data)"
)

# ── llama.h ─────────────────────────────────────────────────────────────────────────────────

MACROS = C.enum(
    "",
    """
    LLAMA_TOKEN_NULL                   = -1,
    LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY = 1,
""",
)

C.typedef("llama_memory_t", "struct llama_memory_i *")
C.typedef("llama_pos", "int32_t")
C.typedef("llama_token", "int32_t")
C.typedef("llama_seq_id", "int32_t")
C.typedef("llama_state_seq_flags", "uint32_t")

VOCAB_TYPE = C.enum(
    "llama_vocab_type",
    """
    LLAMA_VOCAB_TYPE_NONE = 0,
""",
)

TOKEN_ATTR = C.enum(
    "llama_token_attr",
    """
    LLAMA_TOKEN_ATTR_UNKNOWN      = 1,
    LLAMA_TOKEN_ATTR_CONTROL      = 8,
    LLAMA_TOKEN_ATTR_USER_DEFINED = 16,
    LLAMA_TOKEN_ATTR_LSTRIP       = 128,
    LLAMA_TOKEN_ATTR_RSTRIP       = 256,
""",
)

FLASH_ATTN_TYPE = C.enum(
    "llama_flash_attn_type",
    """
    LLAMA_FLASH_ATTN_TYPE_AUTO     = -1,
    LLAMA_FLASH_ATTN_TYPE_DISABLED = 0,
    LLAMA_FLASH_ATTN_TYPE_ENABLED  = 1,
""",
)

POOLING_TYPE = C.enum(
    "llama_pooling_type",
    """
    LLAMA_POOLING_TYPE_UNSPECIFIED = -1,
    LLAMA_POOLING_TYPE_NONE = 0,
    LLAMA_POOLING_TYPE_MEAN = 1,
    LLAMA_POOLING_TYPE_CLS  = 2,
    LLAMA_POOLING_TYPE_LAST = 3,
    LLAMA_POOLING_TYPE_RANK = 4,
""",
)

SPLIT_MODE = C.enum(
    "llama_split_mode",
    """
    LLAMA_SPLIT_MODE_NONE   = 0,
    LLAMA_SPLIT_MODE_LAYER  = 1,
    LLAMA_SPLIT_MODE_ROW    = 2,
    LLAMA_SPLIT_MODE_TENSOR = 3,
""",
)

LOAD_MODE = C.enum(
    "llama_load_mode",
    """
    LLAMA_LOAD_MODE_AUTO = -1,
    LLAMA_LOAD_MODE_NONE = 0,
""",
)

llama_token_data = C.struct(
    "llama_token_data",
    """
    llama_token id;
    float logit;
    float p;
""",
)

llama_token_data_array = C.struct(
    "llama_token_data_array",
    """
    llama_token_data * data;
    size_t size;
    int64_t selected;
    bool sorted;
""",
)

llama_progress_callback = C.typedef("llama_progress_callback", "bool (*)(float progress, void * user_data)")

llama_batch = C.struct(
    "llama_batch",
    """
    int32_t n_tokens;

    llama_token  *  token;
    float        *  embd;
    llama_pos    *  pos;
    int32_t      *  n_seq_id;
    llama_seq_id ** seq_id;
    int8_t       *  logits;
""",
)

llama_model_tensor_buft_override = C.struct(
    "llama_model_tensor_buft_override",
    """
    const char * pattern;
    ggml_backend_buffer_type_t buft;
""",
)

llama_model_params = C.struct(
    "llama_model_params",
    """
    ggml_backend_dev_t * devices;
    const struct llama_model_tensor_buft_override * tensor_buft_overrides;

    int32_t n_gpu_layers;
    enum llama_split_mode split_mode;
    enum llama_load_mode  load_mode;
    enum llama_lazy_mode lazy_mode;
    int32_t main_gpu;
    const float * tensor_split;

    llama_progress_callback progress_callback;
    void * progress_callback_user_data;

    const struct llama_model_kv_override * kv_overrides;

    bool vocab_only;
    bool check_tensors;
    bool use_extra_bufts;
    bool no_host;
    bool no_alloc;
    bool load_mtp;
""",
)

llama_context_params = C.struct(
    "llama_context_params",
    """
    uint32_t n_ctx;
    uint32_t n_batch;
    uint32_t n_ubatch;
    uint32_t n_seq_max;
    uint32_t n_rs_seq;
    uint32_t n_outputs_max;
    uint32_t n_outputs_max_per_seq;
    int32_t  n_threads;
    int32_t  n_threads_batch;

    enum llama_context_type      ctx_type;
    enum llama_rope_scaling_type rope_scaling_type;
    enum llama_pooling_type      pooling_type;
    enum llama_attention_type    attention_type;
    enum llama_flash_attn_type   flash_attn_type;

    float    rope_freq_base;
    float    rope_freq_scale;
    float    yarn_ext_factor;
    float    yarn_attn_factor;
    float    yarn_beta_fast;
    float    yarn_beta_slow;
    uint32_t yarn_orig_ctx;
    float    defrag_thold;

    ggml_backend_sched_eval_callback cb_eval;
    void * cb_eval_user_data;

    enum ggml_type type_k;
    enum ggml_type type_v;

    ggml_abort_callback abort_callback;
    void *              abort_callback_data;

    bool embeddings;
    bool offload_kqv;
    bool no_perf;
    bool op_offload;
    bool swa_full;
    bool kv_unified;

    struct llama_sampler_seq_config * samplers;
    size_t                            n_samplers;

    struct llama_context * ctx_other;
""",
)

llama_sampler_chain_params = C.struct(
    "llama_sampler_chain_params",
    """
    bool no_perf;
""",
)
