/*
 * jsctrl: runs the JavaScript program of controller_arg.
 *
 * This file gives QuickJS the functions of the runtime, as the object `host`; jsctrl.js makes the SDK of them.  In each
 * callback it calls begin(phase, argument), lets all promises continue, and returns what answer(phase) says.
 */
#include "aici.h"
#include "quickjs.h"

/* The text of jsctrl.js, with a NUL. */
extern const char jsctrl_sdk[];

/* Bounds, so that a program that does too much gets an error with its line, not the runtime's. */
#define MAX_HEAP_BYTES (40 << 20)
#define MAX_STACK_BYTES (192 << 10)
/* Polls of the interrupt handler, each after 10000 jumps backwards and calls, in one callback. */
#define MAX_POLLS 100

static JSRuntime *runtime;
static JSContext *context;
static JSValue handlers; /* {begin, answer, describe, resolve, source, main} of jsctrl.js */
static JSValue unhandled_promise, unhandled_reason;
static int polls;
static bool ran_too_long;

/* ---- Errors -------------------------------------------------------------------------------------------------- */

static _Noreturn void fail_with(JSValue error)
{
    polls = 0;
    JSValue describe = JS_IsUndefined(handlers) ? JS_UNDEFINED : JS_GetPropertyStr(context, handlers, "describe");
    JSValueConst arguments[] = {error, JS_NewBool(context, ran_too_long)};
    JSValue described = JS_IsFunction(context, describe) ? JS_Call(context, describe, handlers, 2, arguments) : JS_DupValue(context, error);
    const char *text = JS_IsException(described) ? NULL : JS_ToCString(context, described);
    aici_fail(text ? text : "the program failed, and its error cannot be shown: probably there is no memory left");
}

static JSValue check(JSValue value)
{
    if (JS_IsException(value))
        fail_with(JS_GetException(context));
    return value;
}

static int interrupt(JSRuntime *rt, void *opaque)
{
    (void)rt, (void)opaque;
    if (++polls <= MAX_POLLS)
        return 0;
    polls = 0;
    ran_too_long = true;
    return 1;
}

/* A rejected promise that nothing handles by the end of the callback is an error. */
static void rejected(JSContext *ctx, JSValueConst promise, JSValueConst reason, bool is_handled, void *opaque)
{
    (void)opaque;
    bool is_same = JS_VALUE_GET_TAG(unhandled_promise) == JS_TAG_OBJECT &&
                   JS_VALUE_GET_PTR(unhandled_promise) == JS_VALUE_GET_PTR(promise);
    if (is_handled ? !is_same : !JS_IsUndefined(unhandled_promise))
        return;
    JS_FreeValue(ctx, unhandled_promise);
    JS_FreeValue(ctx, unhandled_reason);
    unhandled_promise = is_handled ? JS_UNDEFINED : JS_DupValue(ctx, promise);
    unhandled_reason = is_handled ? JS_UNDEFINED : JS_DupValue(ctx, reason);
}

/* ---- Values ---------------------------------------------------------------------------------------------------- */

static JSValue from_text(struct aici_text text)
{
    JSValue value = JS_NewStringLen(context, text.data, text.size);
    free(text.data);
    return value;
}

static JSValue from_tokens(struct aici_tokens tokens)
{
    JSValue array = JS_NewArray(context);
    for (size_t i = 0; i < tokens.n; i++)
        JS_DefinePropertyValueUint32(context, array, (uint32_t)i, JS_NewUint32(context, tokens.ids[i]), JS_PROP_C_W_E);
    free(tokens.ids);
    return array;
}

static bool to_tokens(JSValueConst array, struct aici_tokens *tokens)
{
    JSValue length = JS_GetPropertyStr(context, array, "length");
    uint32_t n = 0;
    if (JS_IsException(length) || JS_ToUint32(context, &n, length))
        return false;
    *tokens = (struct aici_tokens){malloc(n * sizeof(uint32_t) + sizeof(uint32_t)), n};
    if (!tokens->ids) {
        JS_ThrowOutOfMemory(context);
        return false;
    }
    for (uint32_t i = 0; i < n; i++) {
        JSValue token = JS_GetPropertyUint32(context, array, i);
        if (JS_IsException(token) || JS_ToUint32(context, &tokens->ids[i], token)) {
            free(tokens->ids);
            return false;
        }
        JS_FreeValue(context, token);
    }
    return true;
}

/* ---- host: what the runtime offers ------------------------------------------------------------------------------- */

#define HOST_FUNCTION(name) static JSValue name(JSContext *ctx, JSValueConst this, int argc, JSValueConst *argv)
#define UNUSED (void)ctx, (void)this, (void)argc, (void)argv

HOST_FUNCTION(host_log)
{
    UNUSED;
    size_t size;
    const char *text = JS_ToCStringLen(ctx, &size, argv[0]);
    if (!text)
        return JS_EXCEPTION;
    aici_log(text, size);
    JS_FreeCString(ctx, text);
    return JS_UNDEFINED;
}

HOST_FUNCTION(host_tokenize)
{
    UNUSED;
    size_t size;
    const char *text = JS_ToCStringLen(ctx, &size, argv[0]);
    if (!text)
        return JS_EXCEPTION;
    struct aici_tokens tokens = aici_tokenize(text, size);
    JS_FreeCString(ctx, text);
    return from_tokens(tokens);
}

HOST_FUNCTION(host_detokenize)
{
    UNUSED;
    struct aici_tokens tokens;
    if (!to_tokens(argv[0], &tokens))
        return JS_EXCEPTION;
    struct aici_text text = aici_detokenize(tokens.ids, tokens.n);
    free(tokens.ids);
    return from_text(text);
}

HOST_FUNCTION(host_to_bytes)
{
    UNUSED;
    size_t size;
    const char *text = JS_ToCStringLen(ctx, &size, argv[0]);
    if (!text)
        return JS_EXCEPTION;
    JSValue bytes = JS_NewUint8ArrayCopy(ctx, (const uint8_t *)text, size);
    JS_FreeCString(ctx, text);
    return bytes;
}

HOST_FUNCTION(host_from_bytes)
{
    UNUSED;
    size_t size;
    const uint8_t *bytes = JS_GetUint8Array(ctx, &size, argv[0]);
    return bytes ? JS_NewStringLen(ctx, (const char *)bytes, size) : JS_EXCEPTION;
}

HOST_FUNCTION(host_get_variable)
{
    UNUSED;
    const char *name = JS_ToCString(ctx, argv[0]);
    if (!name)
        return JS_EXCEPTION;
    struct aici_variable variable = aici_get_variable(name);
    JS_FreeCString(ctx, name);
    return variable.value.data ? from_text(variable.value) : JS_NULL;
}

/* (name, value, whether to append) */
HOST_FUNCTION(host_write_variable)
{
    UNUSED;
    size_t size;
    const char *name = JS_ToCString(ctx, argv[0]), *value = JS_ToCStringLen(ctx, &size, argv[1]);
    if (!name || !value)
        return JS_EXCEPTION;
    struct aici_variable answer = JS_ToBool(ctx, argv[2]) ? aici_append_variable(name, value, size, 0) : aici_set_variable(name, value, size, 0);
    free(answer.value.data);
    JS_FreeCString(ctx, name);
    JS_FreeCString(ctx, value);
    return JS_UNDEFINED;
}

HOST_FUNCTION(host_allow_all)
{
    UNUSED;
    static struct aici_set all;
    if (!all.words)
        aici_set_fill(&all);
    aici_host_return_logit_bias(all.words);
    return JS_UNDEFINED;
}

HOST_FUNCTION(host_self)
{
    UNUSED;
    return JS_NewUint32(ctx, aici_host_self_seq_id());
}

static JSValue constraint_result(int32_t result)
{
    if (result >= 0)
        return JS_NewInt32(context, result);
    struct aici_text why = aici_blob(AICI_CONSTRAINT_ERROR_BLOB);
    JS_ThrowTypeError(context, "%s", why.data);
    free(why.data);
    return JS_EXCEPTION;
}

HOST_FUNCTION(host_constraint)
{
    UNUSED;
    size_t size;
    const char *json = JS_ToCStringLen(ctx, &size, argv[0]);
    if (!json)
        return JS_EXCEPTION;
    int32_t id = aici_constraint_new(json, size);
    JS_FreeCString(ctx, json);
    return constraint_result(id);
}

HOST_FUNCTION(host_advance)
{
    UNUSED;
    uint32_t token;
    if (JS_ToUint32(ctx, &token, argv[1]))
        return JS_EXCEPTION;
    return constraint_result(aici_constraint_advance(JS_VALUE_GET_INT(argv[0]), &token, 1));
}

HOST_FUNCTION(host_allow)
{
    UNUSED;
    return constraint_result(aici_constraint_mask(JS_VALUE_GET_INT(argv[0])));
}

HOST_FUNCTION(host_allowed_one)
{
    UNUSED;
    return JS_NewInt32(ctx, aici_constraint_allowed_one(JS_VALUE_GET_INT(argv[0])));
}

HOST_FUNCTION(host_is_done)
{
    UNUSED;
    return JS_NewBool(ctx, aici_constraint_is_done(JS_VALUE_GET_INT(argv[0])) > 0);
}

HOST_FUNCTION(host_drop)
{
    UNUSED;
    aici_constraint_drop(JS_VALUE_GET_INT(argv[0]));
    return JS_UNDEFINED;
}

static const JSCFunctionListEntry HOST[] = {
    JS_CFUNC_DEF("log", 1, host_log),
    JS_CFUNC_DEF("tokenize", 1, host_tokenize),
    JS_CFUNC_DEF("detokenize", 1, host_detokenize),
    JS_CFUNC_DEF("toBytes", 1, host_to_bytes),
    JS_CFUNC_DEF("fromBytes", 1, host_from_bytes),
    JS_CFUNC_DEF("getVariable", 1, host_get_variable),
    JS_CFUNC_DEF("writeVariable", 3, host_write_variable),
    JS_CFUNC_DEF("allowAll", 0, host_allow_all),
    JS_CFUNC_DEF("self", 0, host_self),
    JS_CFUNC_DEF("constraint", 1, host_constraint),
    JS_CFUNC_DEF("advance", 2, host_advance),
    JS_CFUNC_DEF("allow", 1, host_allow),
    JS_CFUNC_DEF("allowedOne", 1, host_allowed_one),
    JS_CFUNC_DEF("isDone", 1, host_is_done),
    JS_CFUNC_DEF("drop", 1, host_drop),
};

/* ---- Modules --------------------------------------------------------------------------------------------------- */

static JSValue call(const char *name, int n, JSValueConst *arguments)
{
    JSValue function = JS_GetPropertyStr(context, handlers, name);
    JSValue result = JS_Call(context, function, handlers, n, arguments);
    JS_FreeValue(context, function);
    return result;
}

/* The name of the module that `base` imports as `name`. */
static char *resolve(JSContext *ctx, const char *base, const char *name, void *opaque)
{
    (void)opaque;
    JSValue arguments[] = {JS_NewString(ctx, base), JS_NewString(ctx, name)};
    JSValue found = call("resolve", 2, arguments);
    JS_FreeValue(ctx, arguments[0]);
    JS_FreeValue(ctx, arguments[1]);
    const char *text = JS_IsException(found) ? NULL : JS_ToCString(ctx, found);
    char *copy = text ? js_strdup(ctx, text) : NULL;
    JS_FreeCString(ctx, text);
    JS_FreeValue(ctx, found);
    return copy;
}

/* A module that is compiled, and not run. */
static JSValue compile(const char *name)
{
    JSValue argument = JS_NewString(context, name);
    JSValue source = call("source", 1, &argument);
    JS_FreeValue(context, argument);
    size_t size;
    const char *text = JS_IsException(source) ? NULL : JS_ToCStringLen(context, &size, source);
    JS_FreeValue(context, source);
    if (!text)
        return JS_EXCEPTION;
    JSValue module = JS_Eval(context, text, size, name, JS_EVAL_TYPE_MODULE | JS_EVAL_FLAG_COMPILE_ONLY);
    JS_FreeCString(context, text);
    return module;
}

static JSModuleDef *load_module(JSContext *ctx, const char *name, void *opaque)
{
    (void)opaque;
    JSValue module = compile(name);
    if (JS_IsException(module))
        return NULL;
    JSModuleDef *definition = JS_VALUE_GET_PTR(module);
    JS_FreeValue(ctx, module); /* the context keeps it */
    return definition;
}

/* ---- Callbacks ------------------------------------------------------------------------------------------------- */

/* Lets all promises continue. */
static void run_jobs(void)
{
    int left;
    JSContext *failed;
    while ((left = JS_ExecutePendingJob(runtime, &failed)) > 0)
        ;
    if (left < 0)
        check(JS_EXCEPTION);
    if (!JS_IsUndefined(unhandled_promise))
        fail_with(unhandled_reason);
}

static void run_callback(const char *phase_name)
{
    polls = 0;
    struct aici_text json = aici_blob(aici_host_process_arg());
    JSValue phase = JS_NewString(context, phase_name);
    JSValue argument = check(JS_ParseJSON(context, json.data, json.size, "<argument>"));
    free(json.data);
    JSValueConst arguments[] = {phase, argument};
    JS_FreeValue(context, check(call("begin", 2, arguments)));
    JS_FreeValue(context, argument);
    run_jobs();
    JSValue answer = check(call("answer", 1, arguments));
    size_t size;
    const char *text = JS_ToCStringLen(context, &size, answer);
    if (!text)
        check(JS_EXCEPTION);
    aici_host_return_process_result(text, size);
    JS_FreeCString(context, text);
    JS_FreeValue(context, answer);
    JS_FreeValue(context, phase);
}

AICI_EXPORT("aici_init") void aici_init(void) {}

/* All of the language.  JS_NewContext would add `performance`, which aborts without a clock. */
static JSContext *new_context(void)
{
    JSContext *made = JS_NewContextRaw(runtime);
    bool failed = !made || JS_AddIntrinsicBaseObjects(made) || JS_AddIntrinsicDate(made) || JS_AddIntrinsicEval(made) ||
                  JS_AddIntrinsicRegExp(made) || JS_AddIntrinsicJSON(made) || JS_AddIntrinsicProxy(made) ||
                  JS_AddIntrinsicMapSet(made) || JS_AddIntrinsicTypedArrays(made) || JS_AddIntrinsicPromise(made) ||
                  JS_AddIntrinsicWeakRef(made) || JS_AddIntrinsicAToB(made);
    return failed ? NULL : made;
}

/* Everything begins in the first callback whose logs the runtime shows. */
static void load_program(void)
{
    handlers = unhandled_promise = unhandled_reason = JS_UNDEFINED;
    runtime = JS_NewRuntime();
    context = runtime ? new_context() : NULL;
    if (!context)
        aici_fail("out of memory");
    JS_SetMemoryLimit(runtime, MAX_HEAP_BYTES);
    JS_SetMaxStackSize(runtime, MAX_STACK_BYTES);
    JS_SetInterruptHandler(runtime, interrupt, NULL);
    JS_SetHostPromiseRejectionTracker(runtime, rejected, NULL);
    JS_SetModuleLoaderFunc(runtime, resolve, load_module, NULL);

    JSValue host = JS_NewObject(context);
    JS_SetPropertyFunctionList(context, host, HOST, sizeof HOST / sizeof *HOST);
    JS_SetPropertyStr(context, host, "endToken", JS_NewUint32(context, aici_host_eos_token()));
    JS_SetPropertyStr(context, host, "argument", from_text(aici_module_arg()));
    JSValue sdk = check(JS_Eval(context, jsctrl_sdk, strlen(jsctrl_sdk), "<jsctrl>", JS_EVAL_TYPE_GLOBAL));
    handlers = check(JS_Call(context, sdk, JS_UNDEFINED, 1, &host));
    JS_FreeValue(context, sdk);
    JS_FreeValue(context, host);

    JSValue name = check(call("main", 0, NULL));
    const char *main_module = JS_ToCString(context, name);
    JSValue program = check(compile(main_module ? main_module : ""));
    JS_FreeCString(context, main_module);
    JS_FreeValue(context, name);
    if (JS_ResolveModule(context, program) < 0)
        check(JS_EXCEPTION);
    JS_FreeValue(context, check(JS_EvalFunction(context, program)));
    run_jobs();
}

AICI_EXPORT("aici_create") int32_t aici_create(void)
{
    return 1;
}

AICI_EXPORT("aici_init_prompt") void aici_init_prompt(int32_t handle)
{
    (void)handle;
    load_program();
    run_callback("prompt");
}

AICI_EXPORT("aici_pre_process") void aici_pre_process(int32_t handle)
{
    (void)handle;
    run_callback("pre");
}

AICI_EXPORT("aici_mid_process") void aici_mid_process(int32_t handle)
{
    (void)handle;
    run_callback("mid");
}

AICI_EXPORT("aici_post_process") void aici_post_process(int32_t handle)
{
    (void)handle;
    run_callback("post");
}
