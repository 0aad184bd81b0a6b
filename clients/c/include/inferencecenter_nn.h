/* libinferencecenter_nn: models of an InferenceCenter daemon by the functions of a wasi-nn backend.
 *
 * A graph is a model, an execution context is a session, input tensor 0 is the prompt (UTF-8), `compute` runs a turn,
 * and output tensor 0 is its text. The library speaks the daemon's protocol over its Unix socket; docs/c-library.md
 * has the keys of the configuration and of the status.
 *
 * Threads: every function may be called from any thread. A backend runs one call at a time, and others wait, except
 * `inferencecenter_nn_abort`; programs that compute concurrently open a backend for each thread. `deinit_backend` must be
 * the last call with its backend.
 */
#ifndef INFERENCECENTER_NN_H
#define INFERENCECENTER_NN_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Errors. Numbers below 100 are those of wasi-nn, the others those of WasmEdge. */
typedef enum {
    success = 0,
    invalid_argument = 1,      /* a handle, index, size or value is wrong */
    invalid_encoding = 2,      /* a text is not UTF-8, or a configuration is not JSON */
    timeout = 3,               /* the turn reached its `max_time_ms` */
    runtime_error = 4,         /* the turn or the connection failed, or memory is used up */
    unsupported_operation = 5, /* the daemon does not offer this */
    too_large = 6,             /* an input, an answer or a configuration is too large, or an output buffer too small */
    not_found = 7,             /* there is no such session any more */
    security = 8,              /* the account may not do this, or its quota is used up */
    unknown = 9,
    end_of_sequence = 100, /* not used: `compute` returns when the answer is complete */
    context_full = 101,    /* the context is full; the output so far can be read */
    prompt_tool_long = 102, /* the prompt does not fit the context; the name is spelled as in other runtimes */
    model_not_found = 103
} wasi_nn_error;

typedef struct {
    uint32_t *buf;
    uint32_t size;
} tensor_dimensions;

/* Types of elements. A text is bytes, so the library accepts any type. */
#if defined(WASM_ENABLE_WASI_EPHEMERAL_NN) && WASM_ENABLE_WASI_EPHEMERAL_NN != 0
typedef enum { fp16 = 0, fp32, fp64, bf16, u8, i32, i64 } tensor_type;
#else
typedef enum { fp16 = 0, fp32, up8, ip32 } tensor_type;
#endif

typedef uint8_t *tensor_data;

/* A tensor of text: the product of its dimensions is the number of bytes, of which those from the first NUL on are not
 * part of the text. No byte beyond is read, unlike in backends that expect a string that ends with NUL. */
typedef struct {
    tensor_dimensions *dimensions;
    tensor_type type;
    tensor_data data;
} tensor;

typedef uint32_t graph;
typedef uint32_t graph_execution_context;

/* Kinds of `get_backend_status`. */
typedef enum {
    backend_status_queue = 0,
    backend_status_memory,
    backend_status_sessions,
    backend_status_performance,
    backend_status_model
} backend_status_kind;

#define INFERENCECENTER_NN_API __attribute__((visibility("default")))

/* Connect to the daemon. The socket is that of the configuration ("socket"), of the variable INFERENCECENTER_SOCKET, or
 * /run/inferencecenter/daemon.sock; the token is that of INFERENCECENTER_TOKEN. Without one the daemon knows the caller
 * by its user id. `config` may be NULL with length 0. */
INFERENCECENTER_NN_API wasi_nn_error init_backend(void **ctx);
INFERENCECENTER_NN_API wasi_nn_error init_backend_with_config(void **ctx, const char *config, uint32_t config_len);

/* Close all sessions and the connection, and free the backend. */
INFERENCECENTER_NN_API wasi_nn_error deinit_backend(void *ctx);

/* Name a model of the daemon; an empty name, or "default", stands for its default model. The configuration extends that
 * of the backend. Whether the model exists is known when a context is opened. */
INFERENCECENTER_NN_API wasi_nn_error load_by_name(void *ctx, const char *filename, uint32_t filename_len, graph *g);
INFERENCECENTER_NN_API wasi_nn_error load_by_name_with_config(void *ctx, const char *filename, uint32_t filename_len,
                                                              const char *config, uint32_t config_len, graph *g);

/* Open a session with the graph's configuration, or one that extends it. */
INFERENCECENTER_NN_API wasi_nn_error init_execution_context(void *ctx, graph g, graph_execution_context *exec_ctx);
INFERENCECENTER_NN_API wasi_nn_error init_execution_context_with_config(void *ctx, graph g, const char *config,
                                                                        uint32_t config_len,
                                                                        graph_execution_context *exec_ctx);
INFERENCECENTER_NN_API wasi_nn_error close_execution_context(void *ctx, graph_execution_context exec_ctx);

/* Set the prompt (index 0), or parameters of all later turns of the context as JSON (index 1). */
INFERENCECENTER_NN_API wasi_nn_error set_input(void *ctx, graph_execution_context exec_ctx, uint32_t index,
                                               tensor *wasi_nn_tensor);

/* Run a turn with the prompt, and wait for its end. The session remembers prompt and answer. */
INFERENCECENTER_NN_API wasi_nn_error compute(void *ctx, graph_execution_context exec_ctx);

/* Receives text of a running turn as it comes, in the thread that runs it: whole characters in UTF-8, with a NUL behind
 * them. Of the functions here it may call `inferencecenter_nn_abort` and `inferencecenter_nn_last_error` only. */
typedef void (*inferencecenter_nn_text_callback)(void *user, graph_execution_context exec_ctx, const char *text,
                                                 uint32_t length);

/* Set what receives the text of the context's turns, besides `get_output`; NULL for nothing. */
INFERENCECENTER_NN_API wasi_nn_error inferencecenter_nn_set_text_callback(void *ctx, graph_execution_context exec_ctx,
                                                                          inferencecenter_nn_text_callback callback,
                                                                          void *user);

/* Abort the turn that runs in a context, from another thread or a text callback, without waiting. Its call returns
 * `runtime_error` once the daemon has ended it; the output so far can be read. Returns `invalid_argument` if the context
 * runs no turn. Not for signal handlers. */
INFERENCECENTER_NN_API wasi_nn_error inferencecenter_nn_abort(void *ctx, graph_execution_context exec_ctx);

/* Copy the text (index 0), or counts and the reason of the end as JSON (index 1). `output_tensor_size` is the size of
 * the buffer, and afterwards that of the output; a buffer that is too small stays as it is, and the call returns
 * `too_large` with the size that is needed. A larger buffer gets a NUL after the output. */
INFERENCECENTER_NN_API wasi_nn_error get_output(void *ctx, graph_execution_context exec_ctx, uint32_t index,
                                                tensor_data output_tensor, uint32_t *output_tensor_size);

/* `set_input`, `compute` and `get_output` in one call; `index` is that of the input and must be 0. `options` are
 * parameters of this turn as JSON, or NULL with length 0. */
INFERENCECENTER_NN_API wasi_nn_error run_inference(void *ctx, graph_execution_context exec_ctx, uint32_t index,
                                                   tensor *input_tensor, tensor_data output_tensor,
                                                   uint32_t *output_tensor_size, const char *options,
                                                   uint32_t options_len);

/* Copy readings of the daemon as a JSON object; sizes as in `get_output`. `kind` is a `backend_status_kind`. */
INFERENCECENTER_NN_API wasi_nn_error get_backend_status(void *ctx, uint32_t kind, char *output, uint32_t *output_size);

/* Return why the last failed call of this thread failed; never NULL, and valid until the thread's next call. */
INFERENCECENTER_NN_API const char *inferencecenter_nn_last_error(void);

typedef enum { nn_log_error = 0, nn_log_warning, nn_log_info, nn_log_debug } inferencecenter_nn_log_level;

/* Receives a line of the log; must not call the library. */
typedef void (*inferencecenter_nn_logger)(void *user, inferencecenter_nn_log_level level, const char *message);

/* Set where all backends log, instead of standard error; NULL restores that. To be called before any backend is used. */
INFERENCECENTER_NN_API void inferencecenter_nn_set_logger(inferencecenter_nn_logger logger, void *user);

#ifdef __cplusplus
}
#endif
#endif
