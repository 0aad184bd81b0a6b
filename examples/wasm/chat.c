/* A conversation: each line of the input is a turn, and its answer is written.
 *
 * Debian: apt install clang lld wasi-libc libclang-rt-dev-wasm32
 *   clang --target=wasm32-wasi -O2 -o chat.wasm chat.c
 *   inferencecenter wasm run chat.wasm
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "wasi_nn.h"

static const char CONFIG[] = "{\"system\": \"You are a helpful assistant.\", \"stopping\": {\"max_tokens\": 200}}";

static void check(int error, const char *what)
{
    if (error == NN_SUCCESS)
        return;
    char message[512] = "";
    uint32_t written = 0;
    if (nn_last_error(message, sizeof message - 1, &written) != NN_SUCCESS)
        written = 0;
    fprintf(stderr, "%s: error %d: %.*s\n", what, error, (int)written, message);
    exit(EXIT_FAILURE);
}

static void answer(nn_context context, const char *prompt)
{
    static char *text;
    static uint32_t size;
    struct nn_tensor tensor = {.type = NN_U8, .data = (const uint8_t *)prompt, .n_data = strlen(prompt)};
    check(nn_set_input(context, 0, &tensor), "set_input");
    int error = nn_compute(context);
    if (error != NN_CONTEXT_FULL) /* there is text even so */
        check(error, "compute");

    uint32_t written;
    while ((error = nn_get_output(context, 0, text, size, &written)) == NN_TOO_LARGE) {
        free(text);
        size = written; /* as many bytes as the text has */
        if ((text = malloc(size)) == NULL)
            abort();
    }
    check(error, "get_output");
    fwrite(text, 1, written, stdout);
    putchar('\n');
    fflush(stdout);
}

int main(int argc, char **argv)
{
    const char *model = argc > 1 ? argv[1] : "default";
    nn_graph graph;
    nn_context context;
    check(nn_load_by_name_with_config(model, strlen(model), CONFIG, sizeof CONFIG - 1, &graph), "load_by_name_with_config");
    check(nn_init_execution_context(graph, &context), "init_execution_context");
    char line[4096];
    while (fgets(line, sizeof line, stdin) != NULL) {
        line[strcspn(line, "\n")] = '\0';
        if (line[0] != '\0')
            answer(context, line);
    }
    return EXIT_SUCCESS;
}
