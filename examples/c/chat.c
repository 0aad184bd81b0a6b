/* A chat in the terminal: ./chat [MODEL], with the daemon's socket in INFERENCECENTER_SOCKET. Ctrl-C aborts an answer, or
 * ends the program if there is none. */
#include <inferencecenter_nn.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char config[] = "{\"system\": \"Answer briefly.\", \"sampling\": {\"temp\": 0.7}, \"n_predict\": 400}";

static void *backend;
static graph_execution_context context;

static int failed(const char *what) {
    fprintf(stderr, "%s: %s\n", what, inferencecenter_nn_last_error());
    return EXIT_FAILURE;
}

static void write_text(void *user, graph_execution_context exec_ctx, const char *text, uint32_t length) {
    (void)user, (void)exec_ctx;
    fwrite(text, 1, length, stdout);
    fflush(stdout);
}

/* Handles SIGINT, which is blocked in all threads: a signal handler could not call the library. */
static void *wait_for_sigint(void *signals) {
    int received;
    while (sigwait(signals, &received) == 0)
        if (inferencecenter_nn_abort(backend, context) != success)
            _exit(130);
    return NULL;
}

/* Run a turn, whose text is written as it comes. */
static wasi_nn_error answer(char *prompt) {
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
    graph loaded;
    sigset_t signals;
    pthread_t waiting;

    sigemptyset(&signals);
    sigaddset(&signals, SIGINT);
    pthread_sigmask(SIG_BLOCK, &signals, NULL);
    if (init_backend(&backend) != success)
        return failed("no daemon");
    if (load_by_name_with_config(backend, model, (uint32_t)strlen(model), config, sizeof config - 1, &loaded) != success ||
        init_execution_context(backend, loaded, &context) != success ||
        inferencecenter_nn_set_text_callback(backend, context, write_text, NULL) != success) {
        int status = failed(model);
        deinit_backend(backend);
        return status;
    }
    if (pthread_create(&waiting, NULL, wait_for_sigint, &signals) != 0) {
        deinit_backend(backend);
        return EXIT_FAILURE;
    }
    int status = EXIT_SUCCESS;
    while ((length = getline(&line, &capacity, stdin)) > 0) {
        if (line[length - 1] == '\n')
            line[--length] = '\0';
        if (length == 0)
            continue;
        if (answer(line) != success)
            failed("no complete answer");
        uint32_t size = sizeof counts;
        if (get_output(backend, context, 1, (tensor_data)counts, &size) != success) {
            status = EXIT_FAILURE; /* not even a part of one, unlike after an abort */
            break;
        }
        fprintf(stderr, "\n%s", counts);
        puts("");
    }
    free(line);
    pthread_cancel(waiting);
    pthread_join(waiting, NULL);
    deinit_backend(backend);
    return status;
}
