/* The imports of wasi_ephemeral_nn that InferenceCenter offers to core modules; docs/wasm.md describes them. */
#ifndef WASI_NN_H
#define WASI_NN_H

#include <stdint.h>

#define NN_IMPORT(module, name) __attribute__((import_module(module), import_name(name)))

enum nn_errno {
    NN_SUCCESS = 0,
    NN_INVALID_ARGUMENT = 1,
    NN_INVALID_ENCODING = 2,
    NN_MISSING_MEMORY = 3,
    NN_BUSY = 4,
    NN_RUNTIME_ERROR = 5,
    NN_UNSUPPORTED_OPERATION = 6,
    NN_TOO_LARGE = 7,
    NN_NOT_FOUND = 8,
    NN_END_OF_SEQUENCE = 100,
    NN_CONTEXT_FULL = 101,
    NN_PROMPT_TOO_LONG = 102,
};

typedef uint32_t nn_graph;
typedef uint32_t nn_context;

struct nn_tensor {
    const uint32_t *dimensions;
    uint32_t n_dimensions;
    uint8_t type; /* NN_U8 */
    const uint8_t *data;
    uint32_t n_data;
};

#define NN_U8 2

int nn_load_by_name(const char *name, uint32_t n_name, nn_graph *graph)
    NN_IMPORT("wasi_ephemeral_nn", "load_by_name");
int nn_load_by_name_with_config(const char *name, uint32_t n_name, const char *config, uint32_t n_config,
                                nn_graph *graph) NN_IMPORT("wasi_ephemeral_nn", "load_by_name_with_config");
int nn_unload(nn_graph graph) NN_IMPORT("wasi_ephemeral_nn", "unload");
int nn_init_execution_context(nn_graph graph, nn_context *context)
    NN_IMPORT("wasi_ephemeral_nn", "init_execution_context");
int nn_finalize_execution_context(nn_context context) NN_IMPORT("wasi_ephemeral_nn", "finalize_execution_context");
int nn_set_input(nn_context context, uint32_t index, const struct nn_tensor *tensor)
    NN_IMPORT("wasi_ephemeral_nn", "set_input");
int nn_compute(nn_context context) NN_IMPORT("wasi_ephemeral_nn", "compute");
int nn_get_output(nn_context context, uint32_t index, void *buffer, uint32_t n_buffer, uint32_t *written)
    NN_IMPORT("wasi_ephemeral_nn", "get_output");
int nn_compute_single(nn_context context) NN_IMPORT("wasi_ephemeral_nn", "compute_single");
int nn_get_output_single(nn_context context, uint32_t index, void *buffer, uint32_t n_buffer, uint32_t *written)
    NN_IMPORT("wasi_ephemeral_nn", "get_output_single");
int nn_fini_single(nn_context context) NN_IMPORT("wasi_ephemeral_nn", "fini_single");
int nn_last_error(char *buffer, uint32_t n_buffer, uint32_t *written) NN_IMPORT("inferencecenter", "last_error");

#endif
