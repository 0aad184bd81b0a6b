/* A chat in the terminal: ./chat [MODEL], with the daemon's socket in INFERENCECENTER_SOCKET. */
#include <inferencecenter_nn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char config[] = "{\"system\": \"Answer briefly.\", \"sampling\": {\"temp\": 0.7}, \"n_predict\": 400,"
                             " \"stream_stdout\": true}";

static int failed(const char *what) {
    fprintf(stderr, "%s: %s\n", what, inferencecenter_nn_last_error());
    return EXIT_FAILURE;
}

/* Run a turn, whose text is written to standard output as it comes. */
static wasi_nn_error answer(void *backend, graph_execution_context context, char *prompt) {
    uint32_t length = (uint32_t)strlen(prompt);
    tensor_dimensions dimensions = {&length, 1};
    tensor input = {&dimensions, (tensor_type)0, (tensor_data)prompt};
    wasi_nn_error error = set_input(backend, context, 0, &input);
    return error == success ? compute(backend, context) : error;
}

int main(int count, char **arguments) {
    const char *model = count > 1 ? arguments[1] : "default";
    char *line = NULL, counts[512];
    size_t capacity = 0;
    ssize_t length;
    void *backend;
    graph loaded;
    graph_execution_context context;

    if (init_backend(&backend) != success)
        return failed("no daemon");
    if (load_by_name_with_config(backend, model, (uint32_t)strlen(model), config, sizeof config - 1, &loaded) != success ||
        init_execution_context(backend, loaded, &context) != success) {
        int status = failed(model);
        deinit_backend(backend);
        return status;
    }
    int status = EXIT_SUCCESS;
    while ((length = getline(&line, &capacity, stdin)) > 0) {
        if (line[length - 1] == '\n')
            line[--length] = '\0';
        if (length == 0)
            continue;
        if (answer(backend, context, line) != success) {
            status = failed("no answer");
            break;
        }
        uint32_t size = sizeof counts;
        if (get_output(backend, context, 1, (tensor_data)counts, &size) == success)
            fprintf(stderr, "\n%s", counts);
        puts("");
    }
    free(line);
    deinit_backend(backend);
    return status;
}
