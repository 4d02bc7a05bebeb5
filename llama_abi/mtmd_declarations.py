"""Declarations of libmtmd, which encodes pictures and sound: mtmd.h and mtmd-helper.h, in the order of the headers."""

from __future__ import annotations

from llama_abi.declarations import Declarations
from llama_abi.types import C

MTMD = Declarations(C)

CHUNK_TYPE = MTMD.enum(
    "mtmd_input_chunk_type",
    """
    MTMD_INPUT_CHUNK_TYPE_TEXT  = 0,
    MTMD_INPUT_CHUNK_TYPE_IMAGE = 1,
    MTMD_INPUT_CHUNK_TYPE_AUDIO = 2,
""",
)

mtmd_input_text = MTMD.struct(
    "mtmd_input_text",
    """
    const char * text;
    size_t text_len;
    bool add_special;
    bool parse_special;
""",
)

MTMD.typedef("mtmd_progress_callback", "bool (*)(float progress, void * user_data)")

mtmd_context_params = MTMD.struct(
    "mtmd_context_params",
    """
    bool use_gpu;
    ggml_backend_dev_t device;
    bool print_timings;
    int n_threads;
    const char * image_marker;
    const char * media_marker;
    enum llama_flash_attn_type flash_attn_type;
    bool warmup;

    int image_min_tokens;
    int image_max_tokens;

    ggml_backend_sched_eval_callback cb_eval;
    void * cb_eval_user_data;

    int32_t batch_max_tokens;

    mtmd_progress_callback progress_callback;
    void * progress_callback_user_data;
""",
)

mtmd_helper_video_init_params = MTMD.struct(
    "mtmd_helper_video_init_params",
    """
    float fps_target;
    const char * ffmpeg_bin_dir;
    int64_t timestamp_interval_ms;
""",
)

mtmd_helper_init_opt = MTMD.struct(
    "mtmd_helper_init_opt",
    """
    struct mtmd_helper_video_init_params video_params;
""",
)

mtmd_helper_bitmap_wrapper = MTMD.struct(
    "mtmd_helper_bitmap_wrapper",
    """
    struct mtmd_bitmap * bitmap;
    struct mtmd_helper_video * video_ctx;
""",
)

mtmd_decoder_pos = MTMD.struct(
    "mtmd_decoder_pos",
    """
    uint32_t t;
    uint32_t x;
    uint32_t y;
    uint32_t z;
""",
)

MTMD_FUNCTIONS = """
    // llama.h, which mtmd.h includes: width of the rows that stand in place of tokens
    int32_t      llama_model_n_embd_inp(const struct llama_model * model);

    // context
    const char * mtmd_default_marker(void);
    struct mtmd_context_params mtmd_context_params_default(void);
    struct mtmd_context * mtmd_init_from_file(const char * mmproj_fname, const struct llama_model * text_model, const struct mtmd_context_params ctx_params);  // !null
    void         mtmd_free(struct mtmd_context * ctx);
    bool         mtmd_decode_use_non_causal(const struct mtmd_context * ctx, const struct mtmd_input_chunk * chunk);
    bool         mtmd_decode_use_mrope(const struct mtmd_context * ctx);
    bool         mtmd_support_vision(const struct mtmd_context * ctx);
    bool         mtmd_support_audio(const struct mtmd_context * ctx);
    int          mtmd_get_audio_sample_rate(const struct mtmd_context * ctx);

    // bitmap: a picture or sound
    struct mtmd_bitmap * mtmd_bitmap_init(uint32_t nx, uint32_t ny, const unsigned char * data);    // !null
    struct mtmd_bitmap * mtmd_bitmap_init_from_audio(size_t n_samples, const float * data);         // !null
    uint32_t     mtmd_bitmap_get_nx(const struct mtmd_bitmap * bitmap);
    uint32_t     mtmd_bitmap_get_ny(const struct mtmd_bitmap * bitmap);
    const unsigned char * mtmd_bitmap_get_data(const struct mtmd_bitmap * bitmap);                  // !null
    void         mtmd_bitmap_free(struct mtmd_bitmap * bitmap);

    // chunks: what a bitmap becomes
    struct mtmd_input_chunks * mtmd_input_chunks_init(void);                                        // !null
    size_t       mtmd_input_chunks_size(const struct mtmd_input_chunks * chunks);
    const struct mtmd_input_chunk * mtmd_input_chunks_get(const struct mtmd_input_chunks * chunks, size_t idx);  // !null
    void         mtmd_input_chunks_free(struct mtmd_input_chunks * chunks);
    enum mtmd_input_chunk_type mtmd_input_chunk_get_type(const struct mtmd_input_chunk * chunk);
    const llama_token * mtmd_input_chunk_get_tokens_text(const struct mtmd_input_chunk * chunk, size_t * n_tokens_output);
    size_t       mtmd_input_chunk_get_n_tokens(const struct mtmd_input_chunk * chunk);
    llama_pos    mtmd_input_chunk_get_n_pos(const struct mtmd_input_chunk * chunk);
    const struct mtmd_image_tokens * mtmd_input_chunk_get_tokens_image(const struct mtmd_input_chunk * chunk);
    struct mtmd_decoder_pos mtmd_image_tokens_get_decoder_pos(const struct mtmd_image_tokens * image_tokens, llama_pos pos_0, size_t i);
    int32_t      mtmd_tokenize(const struct mtmd_context * ctx, struct mtmd_input_chunks * output, const struct mtmd_input_text * text, const struct mtmd_bitmap * const * bitmaps, size_t n_bitmaps);

    // encoding
    int32_t      mtmd_encode_chunk(struct mtmd_context * ctx, const struct mtmd_input_chunk * chunk);
    float *      mtmd_get_output_embd(struct mtmd_context * ctx);                                   // !null

    // mtmd-helper.h
    struct mtmd_helper_init_opt mtmd_helper_init_opt_default(void);
    void         mtmd_helper_log_set(ggml_log_callback log_callback, void * user_data);
    struct mtmd_helper_bitmap_wrapper mtmd_helper_bitmap_init_from_buf(const struct mtmd_context * ctx, const unsigned char * buf, size_t len, bool placeholder, struct mtmd_helper_init_opt opt);
"""
"""The functions that this package calls; see ``functions``."""
