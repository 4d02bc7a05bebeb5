/*
 * aici.h: write AICI controllers in C.  See docs/AICI-CONTROLLERS.md.
 *
 * A controller is a Wasm module that decides, token by token, what a language model may say.  The runtime makes one
 * instance for each sequence and calls it in steps; a fork is an instance with a copy of the memory.  Hence global
 * variables are the state of one sequence, and nothing needs a lock.
 *
 *   #include "aici.h"
 *   static struct aici_mid mid(const uint32_t *fork_group, size_t n) { ... return aici_sample(&allowed); }
 *   AICI_CONTROLLER(.mid = mid)
 *
 * Memory that a function returns belongs to the caller, who may free() it; token bytes belong to the vocabulary.
 */
#pragma once

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- Imports ------------------------------------------------------------------------------------------------- */

#define AICI_IMPORT_FROM(module, name) __attribute__((import_module(module), import_name(name)))
#define AICI_IMPORT(name) AICI_IMPORT_FROM("env", name)
#define AICI_EXPORT(name) __attribute__((export_name(name)))

AICI_IMPORT("aici_host_read_blob") uint32_t aici_host_read_blob(uint32_t blob, void *to, uint32_t size);
AICI_IMPORT("aici_host_module_arg") uint32_t aici_host_module_arg(void);
AICI_IMPORT("aici_host_process_arg") uint32_t aici_host_process_arg(void);
AICI_IMPORT("aici_host_token_trie") uint32_t aici_host_token_trie(void);
AICI_IMPORT("aici_host_tokenize") uint32_t aici_host_tokenize(const char *text, uint32_t size);
AICI_IMPORT("aici_host_return_logit_bias") void aici_host_return_logit_bias(const uint32_t *mask);
AICI_IMPORT("aici_host_return_process_result") void aici_host_return_process_result(const char *json, uint32_t size);
AICI_IMPORT("aici_host_storage_cmd") uint32_t aici_host_storage_cmd(const char *json, uint32_t size);
AICI_IMPORT("aici_host_self_seq_id") uint32_t aici_host_self_seq_id(void);
AICI_IMPORT("aici_host_eos_token") uint32_t aici_host_eos_token(void);
AICI_IMPORT("aici_host_stop") _Noreturn void aici_host_stop(void);

/* The extension of uma-trio: constraints that the runtime follows.  Only a controller that calls them imports them;
 * other runtimes refuse such a controller. */
#define AICI_CONSTRAINT_IMPORT(name) AICI_IMPORT_FROM("uma_trio_constraint", name)
#define AICI_CONSTRAINT_ERROR_BLOB 6
AICI_CONSTRAINT_IMPORT("constraint_new") int32_t aici_constraint_new(const char *json, uint32_t size);
AICI_CONSTRAINT_IMPORT("constraint_mask") int32_t aici_constraint_mask(int32_t id);
AICI_CONSTRAINT_IMPORT("constraint_allowed_one") int32_t aici_constraint_allowed_one(int32_t id);
AICI_CONSTRAINT_IMPORT("constraint_advance") int32_t aici_constraint_advance(int32_t id, const uint32_t *tokens, uint32_t n);
AICI_CONSTRAINT_IMPORT("constraint_can_end") int32_t aici_constraint_can_end(int32_t id);
AICI_CONSTRAINT_IMPORT("constraint_is_done") int32_t aici_constraint_is_done(int32_t id);
AICI_CONSTRAINT_IMPORT("constraint_drop") void aici_constraint_drop(int32_t id);

/* ---- Logs and failure ---------------------------------------------------------------------------------------- */

static inline void aici_log(const char *text, size_t size)
{
    while (size > 0) {
        ssize_t written = write(STDOUT_FILENO, text, size);
        if (written <= 0)
            return;
        text += written;
        size -= (size_t)written;
    }
}

/* Logs a line.  printf works too, and adds about 100 KB to the module. */
static inline void aici_log_line(const char *text)
{
    aici_log(text, strlen(text));
    aici_log("\n", 1);
}

/* Ends this sequence with an error.  The stars tell the reason from what was logged before. */
static inline _Noreturn void aici_fail(const char *why)
{
    aici_log("*** failed: ", 12);
    aici_log_line(why);
    aici_host_stop();
}

static inline void *aici_alloc(size_t size)
{
    void *memory = calloc(1, size ? size : 1);
    if (!memory)
        aici_fail("out of memory");
    return memory;
}

/* ---- Texts: bytes with a length, and a NUL behind them --------------------------------------------------------- */

struct aici_text {
    char *data; /* NULL: there is none */
    size_t size;
};

static inline struct aici_text aici_blob(uint32_t blob)
{
    size_t size = aici_host_read_blob(blob, NULL, 0);
    struct aici_text text = {aici_alloc(size + 1), size};
    aici_host_read_blob(blob, text.data, size);
    return text;
}

/* What the request said in controller_arg: a text as it is, any other value as JSON; "null" if it said nothing. */
static inline struct aici_text aici_module_arg(void)
{
    return aici_blob(aici_host_module_arg());
}

static inline void aici_append(struct aici_text *text, const char *data, size_t size)
{
    text->data = realloc(text->data, text->size + size + 1);
    if (!text->data)
        aici_fail("out of memory");
    memcpy(text->data + text->size, data, size);
    text->size += size;
    text->data[text->size] = 0;
}

static inline void aici_append_string(struct aici_text *text, const char *string)
{
    aici_append(text, string, strlen(string));
}

static inline void aici_append_number(struct aici_text *text, uint32_t number)
{
    char digits[10];
    size_t at = sizeof digits;
    do
        digits[--at] = (char)('0' + number % 10);
    while (number /= 10);
    aici_append(text, digits + at, sizeof digits - at);
}

/* ---- Tokens -------------------------------------------------------------------------------------------------- */

struct aici_tokens {
    uint32_t *ids;
    size_t n;
};

static inline struct aici_tokens aici_tokenize(const char *text, size_t size)
{
    struct aici_text blob = aici_blob(aici_host_tokenize(text, size));
    return (struct aici_tokens){(uint32_t *)(void *)blob.data, blob.size / sizeof(uint32_t)};
}

struct aici_node {
    uint32_t token_and_byte; /* token << 8 | byte; token 0xFFFFFF: none */
    uint32_t size_and_pops;  /* nodes of the subtree with this one << 8 | levels to leave behind its last node */
};

static struct {
    const struct aici_node *nodes; /* depth first; the first one is the root */
    size_t n_nodes;
    const uint32_t *offsets; /* start << 8 | length */
    const uint8_t *bytes;
    uint32_t size;
} aici_vocabulary_;

#define AICI_NO_TOKEN 0xFFFFFFu

static inline void aici_load_vocabulary(void)
{
    if (aici_vocabulary_.nodes)
        return;
    const uint8_t *blob = (const uint8_t *)aici_blob(aici_host_token_trie()).data;
    const uint32_t *header = (const uint32_t *)(const void *)blob;
    if (header[0] != 0x558B6FD3)
        aici_fail("the token trie is not in the format that aici.h knows");
    const uint8_t *nodes = blob + header[1];
    aici_vocabulary_.nodes = (const struct aici_node *)(const void *)nodes;
    aici_vocabulary_.n_nodes = header[2] / sizeof(struct aici_node);
    aici_vocabulary_.offsets = (const uint32_t *)(const void *)(nodes + header[2]);
    aici_vocabulary_.bytes = nodes + header[2] + header[3];
    aici_vocabulary_.size = header[5];
}

/* Tokens have the ids 0 to aici_vocabulary_size() - 1. */
static inline uint32_t aici_vocabulary_size(void)
{
    aici_load_vocabulary();
    return aici_vocabulary_.size;
}

/* The bytes of a token: any part of a UTF-8 text.  Control tokens have none. */
static inline const uint8_t *aici_token_bytes(uint32_t token, size_t *size)
{
    aici_load_vocabulary();
    if (token >= aici_vocabulary_.size) {
        *size = 0;
        return aici_vocabulary_.bytes;
    }
    uint32_t offset = aici_vocabulary_.offsets[token];
    *size = offset & 0xFF;
    return aici_vocabulary_.bytes + (offset >> 8);
}

static inline struct aici_text aici_detokenize(const uint32_t *ids, size_t n)
{
    struct aici_text text = {aici_alloc(1), 0};
    for (size_t i = 0; i < n; i++) {
        size_t size;
        const uint8_t *bytes = aici_token_bytes(ids[i], &size);
        aici_append(&text, (const char *)bytes, size);
    }
    return text;
}

/* ---- Sets of tokens ------------------------------------------------------------------------------------------ */

struct aici_set {
    uint32_t *words; /* NULL until the first token is added */
};

static inline size_t aici_set_words_(void)
{
    return aici_vocabulary_size() / 32 + 1;
}

static inline void aici_set_clear(struct aici_set *set)
{
    if (!set->words)
        set->words = aici_alloc(aici_set_words_() * sizeof(uint32_t));
    memset(set->words, 0, aici_set_words_() * sizeof(uint32_t));
}

static inline void aici_set_fill(struct aici_set *set)
{
    aici_set_clear(set);
    uint32_t n = aici_vocabulary_size();
    memset(set->words, 0xFF, n / 32 * sizeof(uint32_t));
    if (n % 32)
        set->words[n / 32] = (1u << n % 32) - 1;
}

static inline void aici_set_add(struct aici_set *set, uint32_t token)
{
    if (!set->words)
        aici_set_clear(set);
    if (token < aici_vocabulary_size())
        set->words[token / 32] |= 1u << token % 32;
}

static inline void aici_set_remove(struct aici_set *set, uint32_t token)
{
    if (set->words && token < aici_vocabulary_size())
        set->words[token / 32] &= ~(1u << token % 32);
}

static inline bool aici_set_has(const struct aici_set *set, uint32_t token)
{
    return set->words && token < aici_vocabulary_size() && set->words[token / 32] >> token % 32 & 1;
}

/* How many tokens there are.  *last becomes the last one, if there is one and last is not NULL. */
static inline uint32_t aici_set_count(const struct aici_set *set, uint32_t *last)
{
    uint32_t count = 0;
    for (size_t i = 0; set->words && i < aici_set_words_(); i++)
        if (set->words[i]) {
            count += (uint32_t)__builtin_popcount(set->words[i]);
            if (last)
                *last = (uint32_t)(i * 32 + 31) - (uint32_t)__builtin_clz(set->words[i]);
        }
    return count;
}

/*
 * Adds all tokens whose bytes an automaton accepts one after the other.  The walk over the prefix tree asks once for
 * each prefix, not once for each token.
 *
 * push: takes a byte, or answers false and stays as it was.  pop: takes back the last n bytes.
 */
static inline void aici_set_add_accepted(struct aici_set *set, bool (*push)(void *automaton, uint8_t byte),
                                         void (*pop)(void *automaton, unsigned n), void *automaton)
{
    aici_load_vocabulary();
    if (!set->words)
        aici_set_clear(set);
    size_t at = 1;
    while (at < aici_vocabulary_.n_nodes) {
        struct aici_node node = aici_vocabulary_.nodes[at];
        uint32_t token = node.token_and_byte >> 8, size = node.size_and_pops >> 8, pops = node.size_and_pops & 0xFF;
        if (push(automaton, (uint8_t)node.token_and_byte)) {
            if (token != AICI_NO_TOKEN)
                aici_set_add(set, token);
            if (size == 1)
                pop(automaton, pops);
            at += 1;
        } else {
            pop(automaton, pops - 1); /* the byte of this node was not taken */
            at += size;
        }
    }
}

/* ---- Variables: shared by all forks of a request ---------------------------------------------------------------- */

struct aici_variable {
    struct aici_text value; /* data is NULL if the variable does not exist */
    uint32_t version;       /* 1 for the first value, one more for each write */
};

/* The number behind "key": in JSON that the runtime wrote. */
static inline uint32_t aici_json_number_(const char *json, const char *key)
{
    const char *at = strstr(json, key);
    if (!at)
        return 0;
    at += strlen(key);
    while (*at && (*at < '0' || *at > '9'))
        at++;
    return (uint32_t)strtoul(at, NULL, 10);
}

static inline struct aici_variable aici_storage_(struct aici_text *command)
{
    struct aici_variable variable = {{NULL, 0}, 0};
    struct aici_text answer = aici_blob(aici_host_storage_cmd(command->data, command->size));
    free(command->data);
    const char *hex = strstr(answer.data, "\"value\"");
    if (!strstr(answer.data, "VariableMissing"))
        variable.version = aici_json_number_(answer.data, "\"version\"");
    if (hex && (hex = strchr(hex + 7, '"'))) {
        hex++;
        size_t n = strcspn(hex, "\"") / 2;
        variable.value = (struct aici_text){aici_alloc(n + 1), n};
        for (size_t i = 0; i < n; i++) {
            char pair[3] = {hex[2 * i], hex[2 * i + 1], 0};
            variable.value.data[i] = (char)strtoul(pair, NULL, 16);
        }
    }
    free(answer.data);
    return variable;
}

static inline void aici_append_json_string(struct aici_text *json, const char *string)
{
    aici_append(json, "\"", 1);
    for (; *string; string++) {
        unsigned char c = (unsigned char)*string;
        char escaped[7] = {'\\', 'u', '0', '0', "0123456789abcdef"[c >> 4], "0123456789abcdef"[c & 15], 0};
        if (c < 0x20 || c == '"' || c == '\\')
            aici_append(json, escaped, 6);
        else
            aici_append(json, string, 1);
    }
    aici_append(json, "\"", 1);
}

static inline struct aici_variable aici_get_variable(const char *name)
{
    struct aici_text command = {NULL, 0};
    aici_append_string(&command, "{\"ReadVar\":{\"name\":");
    aici_append_json_string(&command, name);
    aici_append_string(&command, "}}");
    return aici_storage_(&command);
}

static inline struct aici_variable aici_write_variable_(const char *name, const char *value, size_t size, const char *op,
                                                        uint32_t only_version)
{
    struct aici_text command = {NULL, 0};
    aici_append_string(&command, "{\"WriteVar\":{\"name\":");
    aici_append_json_string(&command, name);
    aici_append_string(&command, ",\"value\":\"");
    for (size_t i = 0; i < size; i++) {
        unsigned char c = (unsigned char)value[i];
        char pair[2] = {"0123456789abcdef"[c >> 4], "0123456789abcdef"[c & 15]};
        aici_append(&command, pair, 2);
    }
    aici_append_string(&command, "\",\"op\":\"");
    aici_append_string(&command, op);
    aici_append_string(&command, "\",\"when_version_is\":");
    if (only_version)
        aici_append_number(&command, only_version);
    else
        aici_append_string(&command, "null");
    aici_append_string(&command, "}}");
    return aici_storage_(&command);
}

/* Both write, and answer the new version.  With only_version they write only if the variable has this version; otherwise
 * they answer the current value. */
static inline struct aici_variable aici_set_variable(const char *name, const char *value, size_t size, uint32_t only_version)
{
    return aici_write_variable_(name, value, size, "Set", only_version);
}

static inline struct aici_variable aici_append_variable(const char *name, const char *value, size_t size, uint32_t only_version)
{
    return aici_write_variable_(name, value, size, "Append", only_version);
}

/* ---- Results of the callbacks ---------------------------------------------------------------------------------- */

/* Before a step.  {.forks = 1}: go on.  0: end here.  n: go on as n sequences, which the next mid tells apart.
 * tokens are appended without sampling; post is called with them, then pre again.  suspend: skip this step. */
struct aici_pre {
    uint32_t forks;
    bool suspend;
    const uint32_t *tokens;
    size_t n;
};

/* In a step: make it with aici_sample, aici_splice or aici_stop. */
struct aici_mid {
    enum { AICI_SAMPLE, AICI_SPLICE, AICI_STOP } kind;
    uint32_t backtrack;
    uint32_t one;
    const uint32_t *tokens;
    size_t n;
};

/* The model ends the text now. */
static inline struct aici_mid aici_stop(void)
{
    return (struct aici_mid){.kind = AICI_STOP};
}

/* Removes the last `backtrack` tokens, then appends `tokens` without sampling.  The tokens must outlive the callback. */
static inline struct aici_mid aici_splice(uint32_t backtrack, const uint32_t *tokens, size_t n)
{
    return (struct aici_mid){.kind = AICI_SPLICE, .backtrack = backtrack, .tokens = tokens, .n = n};
}

/* The model chooses one of `allowed`.  If there is only one, it is appended without sampling. */
static inline struct aici_mid aici_sample(const struct aici_set *allowed)
{
    uint32_t last = 0, count = aici_set_count(allowed, &last);
    if (count == 0)
        aici_fail("no token is allowed");
    if (count == 1 && last == aici_host_eos_token())
        return aici_stop();
    if (count == 1)
        return (struct aici_mid){.kind = AICI_SPLICE, .one = last, .n = 1};
    aici_host_return_logit_bias(allowed->words);
    return (struct aici_mid){.kind = AICI_SAMPLE};
}

/* Which of the forks this one is: 0 for the parent. */
static inline uint32_t aici_fork_index(const uint32_t *fork_group, size_t n)
{
    uint32_t self = aici_host_self_seq_id();
    for (size_t i = 0; i < n; i++)
        if (fork_group[i] == self)
            return (uint32_t)i;
    aici_fail("this sequence is not in its own fork group");
}

/* A callback that is NULL does the usual thing. */
struct aici_controller {
    void (*prompt)(const uint32_t *tokens, size_t n);                          /* usual: nothing */
    struct aici_pre (*pre)(void);                                              /* usual: go on */
    struct aici_mid (*mid)(const uint32_t *fork_group, size_t n);              /* usual: any token */
    bool (*post)(const uint32_t *tokens, size_t n, uint32_t backtrack);        /* stop?  usual: at the end token; yours must look for it too */
};

/* ---- From JSON to callbacks and back ---------------------------------------------------------------------------- */

/* The numbers of the array behind "key": in JSON that the runtime wrote. */
static inline struct aici_tokens aici_json_numbers_(const char *json, const char *key)
{
    const char *at = strstr(json, key);
    if (!at || !(at = strchr(at, '[')))
        return (struct aici_tokens){NULL, 0};
    struct aici_tokens found = {aici_alloc(strcspn(at, "]") / 2 * sizeof(uint32_t) + sizeof(uint32_t)), 0};
    at++;
    while (*at && *at != ']') {
        char *end;
        uint32_t number = (uint32_t)strtoul(at, &end, 10);
        if (end == at) {
            at++;
            continue;
        }
        found.ids[found.n++] = number;
        at = end;
    }
    return found;
}

static inline void aici_append_tokens_(struct aici_text *json, const uint32_t *tokens, size_t n)
{
    aici_append_string(json, "[");
    for (size_t i = 0; i < n; i++) {
        if (i)
            aici_append_string(json, ",");
        aici_append_number(json, tokens[i]);
    }
    aici_append_string(json, "]");
}

static inline void aici_answer(const char *json)
{
    aici_host_return_process_result(json, strlen(json));
}

static inline void aici_run_prompt_(const struct aici_controller *controller)
{
    struct aici_text json = aici_blob(aici_host_process_arg());
    struct aici_tokens prompt = aici_json_numbers_(json.data, "\"prompt\"");
    if (controller->prompt)
        controller->prompt(prompt.ids, prompt.n);
    free(prompt.ids);
    free(json.data);
    aici_answer("{}");
}

static inline void aici_run_pre_(const struct aici_controller *controller)
{
    struct aici_pre pre = controller->pre ? controller->pre() : (struct aici_pre){.forks = 1};
    struct aici_text json = {NULL, 0};
    aici_append_string(&json, "{\"num_forks\":");
    aici_append_number(&json, pre.forks);
    aici_append_string(&json, pre.suspend ? ",\"suspend\":true,\"ff_tokens\":" : ",\"suspend\":false,\"ff_tokens\":");
    aici_append_tokens_(&json, pre.tokens, pre.n);
    aici_append_string(&json, "}");
    aici_answer(json.data);
    free(json.data);
}

static inline void aici_run_mid_(const struct aici_controller *controller)
{
    struct aici_mid mid;
    if (controller->mid) {
        struct aici_text json = aici_blob(aici_host_process_arg());
        struct aici_tokens group = aici_json_numbers_(json.data, "\"fork_group\"");
        mid = controller->mid(group.ids, group.n);
        free(group.ids);
        free(json.data);
    } else {
        static struct aici_set all;
        if (!all.words)
            aici_set_fill(&all);
        mid = aici_sample(&all);
    }
    if (mid.kind == AICI_STOP) {
        aici_answer("\"Stop\"");
    } else if (mid.kind == AICI_SAMPLE) {
        aici_answer("{\"SampleWithBias\":{}}");
    } else {
        struct aici_text json = {NULL, 0};
        aici_append_string(&json, "{\"Splice\":{\"backtrack\":");
        aici_append_number(&json, mid.backtrack);
        aici_append_string(&json, ",\"ff_tokens\":");
        aici_append_tokens_(&json, mid.tokens ? mid.tokens : &mid.one, mid.n);
        aici_append_string(&json, "}}");
        aici_answer(json.data);
        free(json.data);
    }
}

static inline void aici_run_post_(const struct aici_controller *controller)
{
    struct aici_text json = aici_blob(aici_host_process_arg());
    struct aici_tokens tokens = aici_json_numbers_(json.data, "\"tokens\"");
    bool stop = false;
    if (controller->post)
        stop = controller->post(tokens.ids, tokens.n, aici_json_number_(json.data, "\"backtrack\""));
    else
        for (size_t i = 0; i < tokens.n; i++)
            stop |= tokens.ids[i] == aici_host_eos_token();
    free(tokens.ids);
    free(json.data);
    aici_answer(stop ? "{\"stop\":true}" : "{\"stop\":false}");
}

/* Makes the module a controller with these callbacks.  Once in a program, at the end of a file. */
#define AICI_CONTROLLER(...)                                                                                             \
    static const struct aici_controller aici_controller_ = {__VA_ARGS__};                                                \
    AICI_EXPORT("aici_init") void aici_export_init_(void) {}                                                             \
    AICI_EXPORT("aici_create") int32_t aici_export_create_(void) { return 1; }                                           \
    AICI_EXPORT("aici_init_prompt") void aici_export_prompt_(int32_t handle) { (void)handle; aici_run_prompt_(&aici_controller_); } \
    AICI_EXPORT("aici_pre_process") void aici_export_pre_(int32_t handle) { (void)handle; aici_run_pre_(&aici_controller_); } \
    AICI_EXPORT("aici_mid_process") void aici_export_mid_(int32_t handle) { (void)handle; aici_run_mid_(&aici_controller_); } \
    AICI_EXPORT("aici_post_process") void aici_export_post_(int32_t handle) { (void)handle; aici_run_post_(&aici_controller_); }
