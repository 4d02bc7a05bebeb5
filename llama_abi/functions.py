"""The C functions that this package calls: one per line, grouped as in llama.h.

The comment after a function is its error rule; see ``declarations``. A test reports functions that are not called.
"""

from __future__ import annotations

FUNCTIONS = """
    // ggml-backend.h: devices
    ggml_backend_reg_t ggml_backend_load(const char * path);
    size_t       ggml_backend_dev_count(void);
    ggml_backend_dev_t ggml_backend_dev_get(size_t index);                                          // !null
    const char * ggml_backend_dev_name(ggml_backend_dev_t device);
    const char * ggml_backend_dev_description(ggml_backend_dev_t device);
    void         ggml_backend_dev_memory(ggml_backend_dev_t device, size_t * free, size_t * total);
    enum ggml_backend_dev_type ggml_backend_dev_type(ggml_backend_dev_t device);
    ggml_backend_buffer_type_t ggml_backend_dev_buffer_type(ggml_backend_dev_t device);             // !null
    const char * ggml_backend_buft_name(ggml_backend_buffer_type_t buft);
    ggml_backend_reg_t ggml_backend_dev_backend_reg(ggml_backend_dev_t device);                     // !null
    const char * ggml_backend_reg_name(ggml_backend_reg_t reg);
    void *       ggml_backend_reg_get_proc_address(ggml_backend_reg_t reg, const char * name);
    ggml_backend_reg_t ggml_backend_reg_by_name(const char * name);                                 // !null
    void         ggml_backend_register(ggml_backend_reg_t reg);

    // ggml-backend.h: memory of devices
    ggml_backend_buffer_type_t ggml_backend_buffer_get_type(ggml_backend_buffer_t buffer);          // !null
    ggml_backend_buffer_t ggml_backend_buft_alloc_buffer(ggml_backend_buffer_type_t buft, size_t size);  // !null
    void *       ggml_backend_buffer_get_base(ggml_backend_buffer_t buffer);                        // !null
    void         ggml_backend_buffer_free(ggml_backend_buffer_t buffer);
    void         ggml_backend_tensor_set(struct ggml_tensor * tensor, const void * data, size_t offset, size_t size);

    // the library as a whole
    void         llama_backend_init(void);
    void         llama_log_set(ggml_log_callback log_callback, void * user_data);
    const char * llama_print_system_info(void);
    size_t       llama_max_parallel_sequences(void);
    size_t       llama_max_devices(void);
    bool         llama_supports_gpu_offload(void);
    bool         llama_supports_rpc(void);
    struct llama_model_params         llama_model_default_params(void);
    struct llama_context_params       llama_context_default_params(void);
    struct llama_sampler_chain_params llama_sampler_chain_default_params(void);

    // model
    struct llama_model * llama_model_load_from_file(const char * path_model, struct llama_model_params params);   // !null
    void         llama_model_free(struct llama_model * model);
    const struct llama_vocab * llama_model_get_vocab(const struct llama_model * model);             // !null
    int32_t      llama_model_n_ctx_train(const struct llama_model * model);
    int32_t      llama_model_n_embd(const struct llama_model * model);
    int32_t      llama_model_n_embd_out(const struct llama_model * model);
    int32_t      llama_model_n_layer(const struct llama_model * model);
    int32_t      llama_model_n_head(const struct llama_model * model);
    int32_t      llama_model_n_head_kv(const struct llama_model * model);
    int32_t      llama_model_n_swa(const struct llama_model * model);
    int32_t      llama_model_meta_val_str(const struct llama_model * model, const char * key, char * buf, size_t buf_size);
    int32_t      llama_model_meta_count(const struct llama_model * model);
    int32_t      llama_model_meta_key_by_index(const struct llama_model * model, int32_t i, char * buf, size_t buf_size);
    int32_t      llama_model_meta_val_str_by_index(const struct llama_model * model, int32_t i, char * buf, size_t buf_size);
    int32_t      llama_model_desc(const struct llama_model * model, char * buf, size_t buf_size);
    uint64_t     llama_model_size(const struct llama_model * model);
    uint64_t     llama_model_n_params(const struct llama_model * model);
    const char * llama_model_chat_template(const struct llama_model * model, const char * name);
    bool         llama_model_has_encoder(const struct llama_model * model);
    bool         llama_model_has_decoder(const struct llama_model * model);
    bool         llama_model_is_recurrent(const struct llama_model * model);
    bool         llama_model_is_hybrid(const struct llama_model * model);

    // LoRA adapters
    struct llama_adapter_lora * llama_adapter_lora_init(struct llama_model * model, const char * path_lora);       // !null
    void         llama_adapter_lora_free(struct llama_adapter_lora * adapter);
    int32_t      llama_set_adapters_lora(struct llama_context * ctx, struct llama_adapter_lora ** adapters, size_t n_adapters, float * scales);  // !rc

    // context
    struct llama_context * llama_init_from_model(struct llama_model * model, struct llama_context_params params);  // !null
    void         llama_free(struct llama_context * ctx);
    uint32_t     llama_n_ctx(const struct llama_context * ctx);
    uint32_t     llama_n_ctx_seq(const struct llama_context * ctx);
    uint32_t     llama_n_batch(const struct llama_context * ctx);
    uint32_t     llama_n_ubatch(const struct llama_context * ctx);
    uint32_t     llama_n_seq_max(const struct llama_context * ctx);
    llama_memory_t llama_get_memory(const struct llama_context * ctx);
    void         llama_set_causal_attn(struct llama_context * ctx, bool causal_attn);
    void         llama_set_n_threads(struct llama_context * ctx, int32_t n_threads, int32_t n_threads_batch);
    int32_t      llama_n_threads(struct llama_context * ctx);
    int32_t      llama_n_threads_batch(struct llama_context * ctx);
    enum llama_pooling_type llama_pooling_type(const struct llama_context * ctx);
    bool         llama_get_causal_attn(const struct llama_context * ctx);
    void         llama_set_abort_callback(struct llama_context * ctx, ggml_abort_callback abort_callback, void * abort_callback_data);

    // memory: the sequences inside one context
    void         llama_memory_clear(llama_memory_t mem, bool data);
    bool         llama_memory_seq_rm(llama_memory_t mem, llama_seq_id seq_id, llama_pos p0, llama_pos p1);
    void         llama_memory_seq_cp(llama_memory_t mem, llama_seq_id seq_id_src, llama_seq_id seq_id_dst, llama_pos p0, llama_pos p1);
    void         llama_memory_seq_keep(llama_memory_t mem, llama_seq_id seq_id);
    void         llama_memory_seq_add(llama_memory_t mem, llama_seq_id seq_id, llama_pos p0, llama_pos p1, llama_pos delta);
    llama_pos    llama_memory_seq_pos_min(llama_memory_t mem, llama_seq_id seq_id);
    llama_pos    llama_memory_seq_pos_max(llama_memory_t mem, llama_seq_id seq_id);
    bool         llama_memory_can_shift(llama_memory_t mem);

    // state of one sequence
    size_t       llama_state_seq_get_size_ext(struct llama_context * ctx, llama_seq_id seq_id, llama_state_seq_flags flags);
    size_t       llama_state_seq_get_data_ext(struct llama_context * ctx, uint8_t * dst, size_t size, llama_seq_id seq_id, llama_state_seq_flags flags);             // !zero
    size_t       llama_state_seq_set_data_ext(struct llama_context * ctx, const uint8_t * src, size_t size, llama_seq_id dest_seq_id, llama_state_seq_flags flags);  // !zero

    // decoding
    int32_t      llama_decode(struct llama_context * ctx, struct llama_batch batch);
    void         llama_synchronize(struct llama_context * ctx);
    float *      llama_get_logits(struct llama_context * ctx);                                      // !null
    float *      llama_get_embeddings(struct llama_context * ctx);                                  // !null
    float *      llama_get_embeddings_seq(struct llama_context * ctx, llama_seq_id seq_id);         // !null

    // vocabulary
    enum llama_vocab_type llama_vocab_type(const struct llama_vocab * vocab);
    int32_t      llama_vocab_n_tokens(const struct llama_vocab * vocab);
    llama_token  llama_vocab_bos(const struct llama_vocab * vocab);
    llama_token  llama_vocab_eos(const struct llama_vocab * vocab);
    llama_token  llama_vocab_eot(const struct llama_vocab * vocab);
    bool         llama_vocab_get_add_bos(const struct llama_vocab * vocab);
    bool         llama_vocab_get_add_eos(const struct llama_vocab * vocab);
    llama_token  llama_vocab_fim_pre(const struct llama_vocab * vocab);
    llama_token  llama_vocab_fim_suf(const struct llama_vocab * vocab);
    llama_token  llama_vocab_fim_mid(const struct llama_vocab * vocab);
    llama_token  llama_vocab_fim_rep(const struct llama_vocab * vocab);
    llama_token  llama_vocab_fim_sep(const struct llama_vocab * vocab);
    bool         llama_vocab_is_eog(const struct llama_vocab * vocab, llama_token token);
    bool         llama_vocab_is_control(const struct llama_vocab * vocab, llama_token token);
    enum llama_token_attr llama_vocab_get_attr(const struct llama_vocab * vocab, llama_token token);
    int32_t      llama_tokenize(const struct llama_vocab * vocab, const char * text, int32_t text_len, llama_token * tokens, int32_t n_tokens_max, bool add_special, bool parse_special);
    int32_t      llama_token_to_piece(const struct llama_vocab * vocab, llama_token token, char * buf, int32_t length, int32_t lstrip, bool special);
    int32_t      llama_detokenize(const struct llama_vocab * vocab, const llama_token * tokens, int32_t n_tokens, char * text, int32_t text_len_max, bool remove_special, bool unparse_special);

    // samplers, for tests
    struct llama_sampler * llama_sampler_chain_init(struct llama_sampler_chain_params params);      // !null
    void         llama_sampler_chain_add(struct llama_sampler * chain, struct llama_sampler * smpl);
    struct llama_sampler * llama_sampler_init_greedy(void);                                         // !null
    struct llama_sampler * llama_sampler_init_mirostat_v2(uint32_t seed, float tau, float eta);     // !null
    struct llama_sampler * llama_sampler_init_dist(uint32_t seed);                                  // !null
    struct llama_sampler * llama_sampler_init_top_k(int32_t k);                                     // !null
    struct llama_sampler * llama_sampler_init_top_p(float p, size_t min_keep);                      // !null
    struct llama_sampler * llama_sampler_init_min_p(float p, size_t min_keep);                      // !null
    struct llama_sampler * llama_sampler_init_dry(const struct llama_vocab * vocab, float dry_multiplier, float dry_base, int32_t dry_allowed_length, int32_t dry_penalty_last_n, const char ** seq_breakers, size_t num_breakers);  // !null
    struct llama_sampler * llama_sampler_init_temp_ext(float t, float delta, float exponent);       // !null
    struct llama_sampler * llama_sampler_init_xtc(float p, float t, size_t min_keep, uint32_t seed);  // !null
    struct llama_sampler * llama_sampler_init_typical(float p, size_t min_keep);                    // !null
    struct llama_sampler * llama_sampler_init_top_n_sigma(float n);                                 // !null
    struct llama_sampler * llama_sampler_init_penalties(int32_t n_vocab, int32_t penalty_last_n, float penalty_repeat, float penalty_freq, float penalty_present);  // !null
    void         llama_sampler_apply(struct llama_sampler * smpl, llama_token_data_array * cur_p);
    void         llama_sampler_accept(struct llama_sampler * smpl, llama_token token);
    void         llama_sampler_reset(struct llama_sampler * smpl);
    llama_token  llama_sampler_sample(struct llama_sampler * smpl, struct llama_context * ctx, int32_t idx);
    void         llama_sampler_free(struct llama_sampler * smpl);
"""
