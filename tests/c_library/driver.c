/* Calls the library as a test tells it: a command with its arguments, separated by tabs, on each line of standard input.
 * It answers with the number of the error and the number of bytes that follow on the next line: the output, or why the
 * call failed. */
#define _GNU_SOURCE
#include <errno.h>
#include <inferencecenter_nn.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <unistd.h>

#define MAX_ARGUMENTS 6

static void *backend;

static void answer(wasi_nn_error error, const char *output, uint32_t length) {
    if (error != success) {
        output = inferencecenter_nn_last_error();
        length = (uint32_t)strlen(output);
    }
    printf("%d %u\n", (int)error, length);
    fwrite(output, 1, length, stdout);
    printf("\n");
    fflush(stdout);
}

static void answer_number(wasi_nn_error error, const uint32_t *number) {
    char text[16];
    snprintf(text, sizeof text, "%u", *number);
    answer(error, text, (uint32_t)strlen(text));
}

static uint32_t length_of(const char *text) { return text == NULL ? 0 : (uint32_t)strlen(text); }

static uint32_t number(const char *text) { return (uint32_t)strtoul(text, NULL, 10); }

/* A copy of a text with exactly its bytes, so that the sanitizer notices a read behind them. */
static tensor make_tensor(const char *text, tensor_dimensions *dimensions, uint32_t *length) {
    *length = length_of(text);
    uint8_t *data = malloc(*length);
    memcpy(data, text, *length);
    *dimensions = (tensor_dimensions){length, 1};
    return (tensor){dimensions, (tensor_type)0, data};
}

static void with_buffer(const char *size, wasi_nn_error (*call)(void *, uint8_t *, uint32_t *), void *argument) {
    uint32_t n_bytes = number(size);
    uint8_t *buffer = malloc(n_bytes);
    wasi_nn_error error = call(argument, buffer, &n_bytes);
    answer(error, (const char *)buffer, n_bytes);
    free(buffer);
}

static wasi_nn_error output(void *argument, uint8_t *buffer, uint32_t *n_bytes) {
    char **arguments = argument;
    return get_output(backend, number(arguments[1]), number(arguments[2]), buffer, n_bytes);
}

static wasi_nn_error status(void *argument, uint8_t *buffer, uint32_t *n_bytes) {
    return get_backend_status(backend, number(((char **)argument)[1]), (char *)buffer, n_bytes);
}

static wasi_nn_error run(void *argument, uint8_t *buffer, uint32_t *n_bytes) {
    char **arguments = argument;
    uint32_t length;
    tensor_dimensions dimensions;
    tensor text = make_tensor(arguments[2], &dimensions, &length);
    wasi_nn_error error = run_inference(backend, number(arguments[1]), 0, &text, buffer, n_bytes, arguments[4],
                                        length_of(arguments[4]));
    free(text.data);
    return error;
}

static void input(char **arguments) {
    uint32_t length;
    tensor_dimensions dimensions;
    tensor text = make_tensor(arguments[3], &dimensions, &length);
    answer(set_input(backend, number(arguments[1]), number(arguments[2]), &text), "", 0);
    free(text.data);
}

/* A string in a larger buffer, of two dimensions. */
static void input_string(char **arguments) {
    uint32_t sizes[] = {4, 64};
    char buffer[4 * 64] = {0};
    tensor_dimensions dimensions = {sizes, 2};
    tensor text = {&dimensions, (tensor_type)0, (tensor_data)buffer};
    snprintf(buffer, sizeof buffer, "%s", arguments[2]);
    answer(set_input(backend, number(arguments[1]), 0, &text), "", 0);
}

/* Every function with handles, pointers and sizes that are wrong. */
static void call_wrongly(void) {
    uint32_t size = 8, huge[] = {65536, 65536, 65536}, one = 1, none = 0, failures = 0, calls = 0;
    uint8_t bytes[8] = {0};
    graph g;
    graph_execution_context context;
    tensor_dimensions no_dimensions = {NULL, 3}, too_many = {huge, 3}, rank_none = {&one, 0}, rank_huge = {huge, 1u << 30};
    tensor_dimensions empty = {&none, 1};
    tensor tensors[] = {{NULL, 0, bytes},       {&no_dimensions, 0, bytes}, {&too_many, 0, bytes}, {&rank_none, 0, bytes},
                        {&rank_huge, 0, bytes}, {&empty, 0, bytes},         {&empty, 0, NULL}};
#define WRONG(call) (calls++, failures += (call) != success && *inferencecenter_nn_last_error() != '\0')
    WRONG(init_backend(NULL));
    WRONG(deinit_backend(NULL));
    WRONG(load_by_name(NULL, "a", 1, &g));
    WRONG(load_by_name(backend, "a", 1, NULL));
    WRONG(load_by_name(backend, NULL, 1, &g));
    WRONG(load_by_name(backend, "\xff\xfe", 2, &g));
    WRONG(load_by_name_with_config(backend, "default", 7, NULL, 5, &g));
    WRONG(init_execution_context(NULL, 0, &context));
    WRONG(init_execution_context(backend, 0, NULL));
    WRONG(init_execution_context(backend, 77, &context));
    WRONG(init_execution_context_with_config(backend, 0, NULL, 9, &context));
    WRONG(close_execution_context(NULL, 0));
    WRONG(close_execution_context(backend, UINT32_MAX));
    WRONG(set_input(NULL, 0, 0, tensors));
    WRONG(set_input(backend, 12345, 0, tensors));
    WRONG(set_input(backend, 0, 0, NULL));
    for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++)
        WRONG(set_input(backend, 0, 0, &tensors[i]));
    WRONG(set_input(backend, 0, 2, &tensors[0]));
    WRONG(compute(NULL, 0));
    WRONG(compute(backend, 99));
    WRONG(compute(backend, 0));
    WRONG(get_output(NULL, 0, 0, bytes, &size));
    WRONG(get_output(backend, 0, 0, bytes, &size));
    WRONG(get_output(backend, 0, 9, bytes, &size));
    WRONG(run_inference(backend, 0, 1, tensors, bytes, &size, NULL, 0));
    WRONG(run_inference(backend, 0, 0, tensors, bytes, NULL, NULL, 0));
    WRONG(run_inference(backend, 0, 0, tensors, NULL, &size, NULL, 0));
    WRONG(inferencecenter_nn_set_text_callback(NULL, 0, NULL, NULL));
    WRONG(inferencecenter_nn_set_text_callback(backend, 99, NULL, NULL));
    WRONG(inferencecenter_nn_abort(NULL, 0));
    WRONG(inferencecenter_nn_abort(backend, 0));
    WRONG(inferencecenter_nn_abort(backend, 99));
    WRONG(get_backend_status(NULL, 0, (char *)bytes, &size));
    WRONG(get_backend_status(backend, 5, (char *)bytes, &size));
    WRONG(get_backend_status(backend, 0, NULL, &size));
    WRONG(get_backend_status(backend, 0, (char *)bytes, NULL));
    answer_number(failures == calls ? success : unknown, &failures);
}

/* Text of a context as it came, each piece before a bar. */
static struct {
    char text[1 << 20];
    uint32_t length;
    uint32_t n_pieces, n_before_abort;
} streamed;

static void take_text(void *user, graph_execution_context context, const char *text, uint32_t length) {
    if (user != &streamed || text[length] != '\0' || streamed.length + length + 1 > sizeof streamed.text)
        abort();
    memcpy(streamed.text + streamed.length, text, length);
    streamed.length += length;
    streamed.text[streamed.length++] = '|';
    if (++streamed.n_pieces == streamed.n_before_abort && inferencecenter_nn_abort(backend, context) != success)
        abort();
}

/* Stream the text of a context, whose turns are aborted after a number of pieces. */
static void stream(char **arguments) {
    streamed.length = streamed.n_pieces = 0;
    streamed.n_before_abort = arguments[2] == NULL ? 0 : number(arguments[2]);
    answer(inferencecenter_nn_set_text_callback(backend, number(arguments[1]), take_text, &streamed), "", 0);
}

static void *abort_turn(void *context) {
    while (inferencecenter_nn_abort(backend, *(uint32_t *)context) != success)
        usleep(1000);
    return NULL;
}

/* Run a turn that another thread aborts as soon as it runs. */
static void interrupt(const char *handle) {
    uint32_t context = number(handle);
    pthread_t thread;
    pthread_create(&thread, NULL, abort_turn, &context);
    wasi_nn_error error = compute(backend, context);
    char reason[1024];
    snprintf(reason, sizeof reason, "%s", inferencecenter_nn_last_error());
    pthread_join(thread, NULL);
    printf("%d %zu\n%s\n", (int)error, strlen(reason), reason);
    fflush(stdout);
}

static void on_alarm(int signal) { (void)signal; }

/* Interrupt system calls from now on, every few milliseconds. */
static void send_alarms(void) {
    struct sigaction action = {.sa_handler = on_alarm}; /* without SA_RESTART */
    struct itimerval every = {{0, 5000}, {0, 5000}};
    sigaction(SIGALRM, &action, NULL);
    setitimer(ITIMER_REAL, &every, NULL);
    answer(success, "", 0);
}

static void *run_context(void *argument) {
    uint32_t n_bytes = 10, size = 4096;
    char text[4096];
    tensor_dimensions dimensions = {&n_bytes, 1};
    tensor prompt = {&dimensions, (tensor_type)0, (tensor_data) "concurrent"};
    graph_execution_context context;
    wasi_nn_error error = init_execution_context(backend, 0, &context);
    for (int i = 0; i < 3 && error == success; i++) {
        size = sizeof text;
        error = run_inference(backend, context, 0, &prompt, (tensor_data)text, &size, NULL, 0);
    }
    if (error == success)
        error = close_execution_context(backend, context);
    *(wasi_nn_error *)argument = error;
    return NULL;
}

/* Threads that share the backend. */
static void run_threads(void) {
    pthread_t threads[4];
    wasi_nn_error errors[4], error = success;
    for (int i = 0; i < 4; i++)
        pthread_create(&threads[i], NULL, run_context, &errors[i]);
    for (int i = 0; i < 4; i++) {
        pthread_join(threads[i], NULL);
        error = errors[i] != success ? errors[i] : error;
    }
    answer(error, "", 0);
}

static void log_line(void *user, inferencecenter_nn_log_level level, const char *message) {
    fprintf(stderr, "%s%d %s\n", (const char *)user, (int)level, message);
}

static void execute(char **arguments) {
    const char *command = arguments[0];
    uint32_t handle = 0;
    if (strcmp(command, "init") == 0)
        answer(init_backend_with_config(&backend, arguments[1], length_of(arguments[1])), "", 0);
    else if (strcmp(command, "deinit") == 0)
        answer(deinit_backend(backend), "", 0);
    else if (strcmp(command, "load") == 0)
        answer_number(load_by_name_with_config(backend, arguments[1], length_of(arguments[1]), arguments[2],
                                               length_of(arguments[2]), &handle),
                      &handle);
    else if (strcmp(command, "open") == 0)
        answer_number(init_execution_context_with_config(backend, number(arguments[1]), arguments[2],
                                                         length_of(arguments[2]), &handle),
                      &handle);
    else if (strcmp(command, "close") == 0)
        answer(close_execution_context(backend, number(arguments[1])), "", 0);
    else if (strcmp(command, "input") == 0)
        input(arguments);
    else if (strcmp(command, "string") == 0)
        input_string(arguments);
    else if (strcmp(command, "compute") == 0)
        answer(compute(backend, number(arguments[1])), "", 0);
    else if (strcmp(command, "output") == 0)
        with_buffer(arguments[3], output, arguments);
    else if (strcmp(command, "run") == 0)
        with_buffer(arguments[3], run, arguments);
    else if (strcmp(command, "status") == 0)
        with_buffer(arguments[2], status, arguments);
    else if (strcmp(command, "stream") == 0)
        stream(arguments);
    else if (strcmp(command, "streamed") == 0)
        answer(success, streamed.text, streamed.length);
    else if (strcmp(command, "interrupt") == 0)
        interrupt(arguments[1]);
    else if (strcmp(command, "alarms") == 0)
        send_alarms();
    else if (strcmp(command, "wrong") == 0)
        call_wrongly();
    else if (strcmp(command, "threads") == 0)
        run_threads();
    else
        exit(2);
}

/* Alarms interrupt the wait for a command, too. */
static ssize_t next_line(char **line, size_t *capacity) {
    ssize_t length;
    do {
        clearerr(stdin);
        errno = 0;
        length = getline(line, capacity, stdin);
    } while (length < 0 && errno == EINTR);
    return length;
}

int main(void) {
    char *line = NULL;
    size_t capacity = 0;
    ssize_t length;
    inferencecenter_nn_set_logger(log_line, "log ");
    while ((length = next_line(&line, &capacity)) > 0) {
        char *arguments[MAX_ARGUMENTS] = {NULL}, *rest = line;
        line[length - 1] = '\0';
        for (int i = 0; i < MAX_ARGUMENTS && rest != NULL; i++)
            arguments[i] = strsep(&rest, "\t");
        for (int i = 0; i < MAX_ARGUMENTS; i++)
            if (arguments[i] != NULL && *arguments[i] == '\0')
                arguments[i] = NULL;
        execute(arguments);
    }
    free(line);
    return 0;
}
