#define _GNU_SOURCE
#include "config.h"
#include "websocket.h"

#include <inttypes.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#define DEFAULT_SOCKET "/run/inferencecenter/daemon.sock"
#define MAX_GRAPHS 64
#define MAX_NAME 256
#define MAX_SESSION_ID 80
#define MAX_TEXT (8 * 1024 * 1024) /* of a prompt, and of an answer */
#define DEFAULT_FRAME_BYTES (1024 * 1024)
#define MAX_DIMENSIONS 16

typedef struct {
    char *model; /* as JSON, NULL for the daemon's default */
    config config;
} nn_graph;

typedef struct {
    bool is_open;
    bool has_answer;
    uint32_t generation; /* of the handles of this place */
    uint32_t graph;
    uint64_t used_at; /* number of the call */
    char session[MAX_SESSION_ID];
    config config;
    inferencecenter_nn_text_callback on_text; /* NULL for none */
    void *user; /* of `on_text` */
    char *prompt;
    size_t n_prompt;
    text_buffer answer;
    text_buffer metadata;
} nn_context;

/* The turn that runs. The thread that runs it holds the backend's mutex until its end, so a thread that wants to abort it
 * cannot send the request: it notes that, and wakes the first one, which waits for bytes of the daemon. The daemon knows
 * the turn from `queued` on; a request to abort it is sent after that. */
typedef struct {
    pthread_mutex_t mutex; /* of all members */
    enum { NO_TURN, TURN_SENT, TURN_QUEUED, TURN_ABORTED } state;
    bool is_abort_wanted;
    graph_execution_context handle;
    const char *session;
} nn_turn;

typedef struct {
    pthread_mutex_t mutex; /* held by each call */
    pthread_t keeper;
    int wake;
    nn_turn turn;
    bool is_lost;
    websocket socket;
    uint64_t n_requests;
    uint64_t n_calls;
    size_t max_frame_bytes;
    config config;
    uint32_t n_graphs;
    nn_graph graphs[MAX_GRAPHS];
    nn_context contexts[CONFIG_MAX_CONTEXTS];
    text_buffer request;
} backend;

static _Thread_local char last_error[1024];

static struct {
    inferencecenter_nn_logger logger;
    void *user;
} log_to;

const char *inferencecenter_nn_last_error(void) { return last_error; }

void inferencecenter_nn_set_logger(inferencecenter_nn_logger logger, void *user) {
    log_to.logger = logger;
    log_to.user = user;
}

static void log_line(const backend *on, inferencecenter_nn_log_level level, const char *message) {
    static const char *const names[] = {"error", "warning", "info", "debug"};
    if ((int)level > on->config.log_level)
        return;
    if (log_to.logger != NULL)
        log_to.logger(log_to.user, level, message);
    else
        fprintf(stderr, "inferencecenter_nn: %s: %s\n", names[level], message);
}

__attribute__((format(printf, 2, 3))) static wasi_nn_error fail(wasi_nn_error error, const char *format, ...) {
    __builtin_va_list arguments;
    __builtin_va_start(arguments, format);
    vsnprintf(last_error, sizeof last_error, format, arguments);
    __builtin_va_end(arguments);
    text_sanitize(last_error); /* it may be cut, and has words of the daemon */
    return error;
}

static wasi_nn_error out_of_memory(void) { return fail(runtime_error, "memory is used up"); }

/* Give up the connection. Its descriptor is closed only with the backend, since the keeper may wait for it. */
static wasi_nn_error lost(backend *on) {
    if (!on->is_lost) {
        on->is_lost = true;
        shutdown(on->socket.fd, SHUT_RDWR);
    }
    return fail(runtime_error, "%s", on->socket.why);
}

/* Answer pings while the program does not call. The daemon closes a connection that does not. */
static void *keep_alive(void *argument) {
    backend *on = argument;
    for (;;) {
        struct pollfd waiting[] = {{.fd = on->wake, .events = POLLIN}, {.fd = on->socket.fd, .events = POLLIN}};
        if (poll(waiting, 2, -1) < 0)
            continue;
        if (waiting[0].revents != 0)
            return NULL;
        pthread_mutex_lock(&on->mutex);
        if (!on->is_lost && !websocket_service(&on->socket))
            lost(on);
        bool is_lost = on->is_lost;
        pthread_mutex_unlock(&on->mutex);
        if (is_lost)
            return NULL;
    }
}

static bool on_wake(void *user);

static bool start_keeper(backend *on) {
    sigset_t all, before;
    on->socket.wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    on->wake = eventfd(0, EFD_CLOEXEC);
    if (on->socket.wake < 0 || on->wake < 0) {
        if (on->wake >= 0)
            close(on->wake);
        return false;
    }
    on->socket.on_wake = on_wake;
    on->socket.user = on;
    /* Signals are the program's. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    bool started = pthread_create(&on->keeper, NULL, keep_alive, on) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!started)
        close(on->wake);
    return started;
}

static backend *enter(void *ctx, const char *call) {
    backend *on = ctx;
    if (on == NULL) {
        fail(invalid_argument, "%s: there is no backend", call);
        return NULL;
    }
    pthread_mutex_lock(&on->mutex);
    on->n_calls++;
    last_error[0] = '\0';
    log_line(on, nn_log_debug, call);
    return on;
}

static wasi_nn_error leave(backend *on, wasi_nn_error error) {
    /* What is in the buffer does not wake the keeper. */
    if (!on->is_lost && on->socket.begin != on->socket.end && !websocket_service(&on->socket)) {
        char message[sizeof last_error];
        memcpy(message, last_error, sizeof message); /* of this call, not of the loss */
        lost(on);
        memcpy(last_error, message, sizeof message);
    }
    pthread_mutex_unlock(&on->mutex);
    return error;
}

/* Begin a request; its fields follow, and `send_request` ends it. */
static void begin_request(backend *on, const char *op) {
    char head[96];
    snprintf(head, sizeof head, "{\"op\":\"%s\",\"id\":\"%" PRIu64 "\"", op, ++on->n_requests);
    text_clear(&on->request);
    text_add_string(&on->request, head);
}

static void add_text(backend *on, const char *name, const char *text, size_t length) {
    text_add(&on->request, ",\"", 2);
    text_add_string(&on->request, name);
    text_add(&on->request, "\":", 2);
    text_add_json(&on->request, text, length);
}

static wasi_nn_error send_request(backend *on) {
    text_add(&on->request, "}", 1);
    if (on->is_lost)
        return lost(on);
    if (on->request.failed || on->request.length > on->max_frame_bytes)
        return fail(too_large, "the request is larger than the %zu bytes that the daemon accepts", on->max_frame_bytes);
    return websocket_send(&on->socket, on->request.data, on->request.length) ? success : lost(on);
}

/* Receive and parse the next message, an object; it is valid until the next one. */
static wasi_nn_error receive(backend *on, json_document *message) {
    const char *why;
    size_t at;
    if (on->is_lost || !websocket_receive(&on->socket))
        return lost(on);
    const text_buffer *text = &on->socket.message;
    if (!json_parse(message, text->data == NULL ? "" : text->data, text->length, &why, &at)) {
        snprintf(on->socket.why, sizeof on->socket.why, "the daemon has sent invalid JSON: %s, at byte %zu", why, at);
        return lost(on);
    }
    return success;
}

static bool has_text(const json_document *message, const char *name, const char *text) {
    uint32_t member = json_member(message, 0, name);
    return member != JSON_NONE && json_equals(message, member, text);
}

static bool answers(const json_document *message, uint64_t request) {
    char id[24];
    snprintf(id, sizeof id, "%" PRIu64, request);
    return has_text(message, "id", id);
}

static wasi_nn_error kind_of(const char *code) {
    static const struct {
        const char *code;
        wasi_nn_error error;
    } kinds[] = {{"invalid_request", invalid_argument},
                 {"invalid_grammar", invalid_argument},
                 {"unknown_op", unsupported_operation},
                 {"not_authenticated", security},
                 {"forbidden", security},
                 {"quota_exceeded", security},
                 {"session_not_found", not_found},
                 {"prompt_too_long", prompt_tool_long},
                 {"context_full", context_full},
                 {"message_too_large", too_large},
                 {"model_not_found", model_not_found}};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (strcmp(kinds[i].code, code) == 0)
            return kinds[i].error;
    return runtime_error;
}

/* Return the text of a member, to be freed; empty if there is none. */
static char *text_of(const json_document *message, const char *name) {
    char *text = json_string(message, json_member(message, 0, name), NULL);
    return text == NULL ? strdup("") : text;
}

static wasi_nn_error refused(const json_document *message) {
    char *code = text_of(message, "code"), *what = text_of(message, "message"), *field = text_of(message, "field");
    char *hint = text_of(message, "hint");
    wasi_nn_error error = runtime_error;
    if (code != NULL && what != NULL && field != NULL && hint != NULL)
        error = fail(kind_of(code), "%s: %s%s%s%s%s%s", code, what, *field ? " (" : "", field, *field ? ")" : "",
                     *hint ? ". " : "", hint);
    free(code);
    free(what);
    free(field);
    free(hint);
    return error;
}

/* Send the request and wait for its reply. */
static wasi_nn_error ask(backend *on, const char *op, json_document *reply) {
    wasi_nn_error error = send_request(on);
    while (error == success) {
        error = receive(on, reply);
        if (error != success)
            break;
        if (answers(reply, on->n_requests)) {
            if (has_text(reply, "op", op))
                return success;
            error = has_text(reply, "op", "error") ? refused(reply) : fail(runtime_error, "an unexpected reply");
        }
        json_free(reply);
    }
    return error;
}

/* Connecting. */

static wasi_nn_error read_greeting(backend *on) {
    json_document hello;
    wasi_nn_error error = receive(on, &hello);
    if (error != success)
        return error;
    bool is_ours = has_text(&hello, "op", "hello") && has_text(&hello, "server", "inferencecenter");
    uint32_t limits = json_member(&hello, 0, "limits");
    int64_t n_bytes;
    if (limits != JSON_NONE && json_integer(&hello, json_member(&hello, limits, "max_frame_bytes"), &n_bytes) &&
        n_bytes > 0)
        on->max_frame_bytes = (size_t)n_bytes;
    json_free(&hello);
    return is_ours ? success : fail(runtime_error, "the server there is not InferenceCenter");
}

static wasi_nn_error authenticate(backend *on) {
    json_document reply;
    const char *token = secure_getenv("INFERENCECENTER_TOKEN");
    begin_request(on, "auth");
    text_add_string(&on->request, ",\"protocol\":1");
    if (token != NULL && *token != '\0') {
        if (!utf8_valid(token, strlen(token)))
            return fail(invalid_encoding, "INFERENCECENTER_TOKEN is not UTF-8");
        add_text(on, "token", token, strlen(token));
    }
    wasi_nn_error error = send_request(on);
    while (error == success) {
        error = receive(on, &reply);
        if (error != success)
            break;
        bool is_reply = answers(&reply, on->n_requests), is_success = has_text(&reply, "op", "auth_success");
        if (is_reply && !is_success) {
            char *reason = text_of(&reply, has_text(&reply, "op", "auth_failed") ? "reason" : "message");
            error = fail(security, "the daemon refuses %s: %s", token ? "INFERENCECENTER_TOKEN" : "this user",
                         reason == NULL ? "" : reason);
            free(reason);
        }
        json_free(&reply);
        if (is_reply)
            break;
    }
    return error;
}

static const char *socket_path(const backend *on) {
    const char *path = on->config.socket != NULL ? on->config.socket : secure_getenv("INFERENCECENTER_SOCKET");
    return path != NULL && *path != '\0' ? path : DEFAULT_SOCKET;
}

static void release(backend *on) {
    websocket_close(&on->socket);
    for (uint32_t i = 0; i < on->n_graphs; i++) {
        free(on->graphs[i].model);
        config_free(&on->graphs[i].config);
    }
    for (uint32_t i = 0; i < CONFIG_MAX_CONTEXTS; i++) {
        config_free(&on->contexts[i].config);
        free(on->contexts[i].prompt);
        text_free(&on->contexts[i].answer);
        text_free(&on->contexts[i].metadata);
    }
    text_free(&on->request);
    config_free(&on->config);
    if (on->socket.wake >= 0)
        close(on->socket.wake);
    pthread_mutex_destroy(&on->turn.mutex);
    pthread_mutex_destroy(&on->mutex);
    free(on);
}

/* Read a configuration and log what has no effect. */
static wasi_nn_error read_config(backend *on, config *into, const char *text, uint32_t length, config_scope scope) {
    config_report report = {0};
    int level = into->log_level;
    wasi_nn_error error = config_read(into, text, length, scope, &report);
    if (error != success)
        fail(error, "%s", *report.why ? report.why : "the configuration is NULL, and its length is not 0");
    if (into->log_level != level)
        on->config.log_level = into->log_level; /* one log for all */
    if (error == success && report.warnings.data != NULL) {
        char *rest = report.warnings.data;
        for (char *line = strsep(&rest, "\n"); line != NULL && *line != '\0'; line = strsep(&rest, "\n")) {
            text_sanitize(line); /* a name may be cut */
            log_line(on, nn_log_warning, line);
        }
    }
    text_free(&report.warnings);
    return error;
}

wasi_nn_error init_backend_with_config(void **ctx, const char *config, uint32_t config_len) {
    last_error[0] = '\0';
    if (ctx == NULL)
        return fail(invalid_argument, "there is no place for the backend");
    *ctx = NULL;
    backend *on = calloc(1, sizeof *on);
    if (on == NULL)
        return out_of_memory();
    pthread_mutex_init(&on->mutex, NULL);
    pthread_mutex_init(&on->turn.mutex, NULL);
    websocket_init(&on->socket, -1);
    on->max_frame_bytes = DEFAULT_FRAME_BYTES;
    on->request.limit = WEBSOCKET_MAX_MESSAGE;
    config_init(&on->config);
    for (uint32_t i = 0; i < CONFIG_MAX_CONTEXTS; i++)
        config_init(&on->contexts[i].config);
    wasi_nn_error error = read_config(on, &on->config, config, config_len, SCOPE_BACKEND);
    if (error == success && !websocket_open(&on->socket, socket_path(on)))
        error = fail(runtime_error, "no daemon at %s: %s", socket_path(on), on->socket.why);
    if (error == success)
        error = read_greeting(on);
    if (error == success)
        error = authenticate(on);
    if (error == success && !start_keeper(on))
        error = fail(runtime_error, "no thread can be started");
    if (error == success)
        *ctx = on;
    else
        release(on);
    return error;
}

wasi_nn_error init_backend(void **ctx) { return init_backend_with_config(ctx, NULL, 0); }

wasi_nn_error deinit_backend(void *ctx) {
    backend *on = enter(ctx, "deinit_backend");
    if (on == NULL)
        return invalid_argument;
    pthread_mutex_unlock(&on->mutex);
    eventfd_write(on->wake, 1);
    pthread_join(on->keeper, NULL);
    close(on->wake);
    release(on);
    return success;
}

/* Graphs. */

/* Log the warnings of a reply. */
static void log_warnings(const backend *on, const json_document *reply) {
    uint32_t warnings = json_member(reply, 0, "warnings");
    if (warnings == JSON_NONE || reply->values[warnings].kind != JSON_ARRAY)
        return;
    for (uint32_t each = json_first(reply, warnings); each != JSON_NONE; each = json_after(reply, warnings, each)) {
        char *line = json_string(reply, each, NULL);
        if (line != NULL) {
            text_sanitize(line);
            log_line(on, nn_log_warning, line);
        }
        free(line);
    }
}

static wasi_nn_error open_session(backend *on, const nn_graph *graph, const config *config, bool log,
                                  char session[MAX_SESSION_ID]) {
    json_document reply;
    begin_request(on, "create_session");
    text_add_string(&on->request, ",\"store\":false,\"on_disconnect\":\"close\"");
    if (graph->model != NULL) {
        text_add_string(&on->request, ",\"model\":");
        text_add_string(&on->request, graph->model);
    }
    config_add_parameters(config, &on->request);
    config_add_session(config, &on->request);
    wasi_nn_error error = ask(on, "session_created", &reply);
    if (error != success)
        return error;
    char *id = text_of(&reply, "session_id");
    if (id == NULL || *id == '\0' || strlen(id) >= MAX_SESSION_ID || !utf8_valid(id, strlen(id)))
        error = fail(runtime_error, "the daemon has sent an invalid session id");
    else
        strcpy(session, id);
    if (log)
        log_warnings(on, &reply);
    free(id);
    json_free(&reply);
    return error;
}

static wasi_nn_error close_session(backend *on, const char *session) {
    json_document reply;
    begin_request(on, "close_session");
    add_text(on, "session_id", session, strlen(session));
    wasi_nn_error error = ask(on, "session_closed", &reply);
    if (error == success)
        json_free(&reply);
    return error;
}

/* Return a model's name as JSON: of a file, its name without directory and suffix, which the daemon gives its models. */
static wasi_nn_error read_model(const char *filename, uint32_t length, char **model) {
    static const char suffix[] = ".gguf";
    const size_t n_suffix = sizeof suffix - 1;
    *model = NULL;
    if (filename == NULL && length > 0)
        return fail(invalid_argument, "the name of the model is NULL, and its length is not 0");
    if (length > 0 && filename[length - 1] == '\0')
        length--;
    if (length > MAX_NAME || !utf8_valid(filename, length) || (length > 0 && memchr(filename, '\0', length) != NULL))
        return fail(invalid_argument, "the name of the model is not UTF-8, or has more than %d bytes", MAX_NAME);
    if (length > n_suffix && memcmp(filename + length - n_suffix, suffix, n_suffix) == 0) {
        const char *slash = memrchr(filename, '/', length);
        length -= (uint32_t)n_suffix;
        if (slash != NULL && slash - filename < (ptrdiff_t)length) {
            length -= (uint32_t)(slash + 1 - filename);
            filename = slash + 1;
        }
    }
    if (length == 0 || (length == 7 && memcmp(filename, "default", 7) == 0))
        return success;
    text_buffer name = {.limit = 8 * MAX_NAME};
    text_add_json(&name, filename, length);
    *model = name.data;
    return name.failed ? out_of_memory() : success;
}

static wasi_nn_error add_graph(backend *on, const char *filename, uint32_t filename_len, const char *text,
                               uint32_t length, graph *g) {
    char session[MAX_SESSION_ID];
    if (g == NULL)
        return fail(invalid_argument, "there is no place for the graph");
    if (on->n_graphs == MAX_GRAPHS)
        return fail(too_large, "the backend has %d graphs already", MAX_GRAPHS);
    nn_graph *added = &on->graphs[on->n_graphs];
    config_init(&added->config);
    wasi_nn_error error = read_model(filename, filename_len, &added->model);
    if (error == success && !config_copy(&added->config, &on->config))
        error = out_of_memory();
    if (error == success)
        error = read_config(on, &added->config, text, length, SCOPE_GRAPH);
    /* A session, which is closed at once, finds out whether the daemon has the model and accepts the parameters. */
    if (error == success)
        error = open_session(on, added, &added->config, true, session);
    if (error == success && close_session(on, session) != success) {
        if (on->is_lost)
            error = runtime_error;
        else /* refused for now; the session ends with the connection */
            log_line(on, nn_log_warning, last_error);
    }
    if (error != success) {
        free(added->model);
        added->model = NULL;
        config_free(&added->config);
        return error;
    }
    *g = on->n_graphs++;
    return success;
}

wasi_nn_error load_by_name_with_config(void *ctx, const char *filename, uint32_t filename_len, const char *config,
                                       uint32_t config_len, graph *g) {
    backend *on = enter(ctx, "load_by_name_with_config");
    return on == NULL ? invalid_argument : leave(on, add_graph(on, filename, filename_len, config, config_len, g));
}

wasi_nn_error load_by_name(void *ctx, const char *filename, uint32_t filename_len, graph *g) {
    return load_by_name_with_config(ctx, filename, filename_len, NULL, 0, g);
}

/* Execution contexts. Their handles hold the number of the place, and how often it was used. */

static graph_execution_context handle_of(const backend *on, const nn_context *context) {
    return context->generation * CONFIG_MAX_CONTEXTS + (uint32_t)(context - on->contexts);
}

static nn_context *find_context(backend *on, graph_execution_context handle) {
    nn_context *found = &on->contexts[handle % CONFIG_MAX_CONTEXTS];
    if (found->is_open && found->generation == handle / CONFIG_MAX_CONTEXTS) {
        found->used_at = on->n_calls;
        return found;
    }
    fail(invalid_argument, "execution context %" PRIu32 " is not open", handle);
    return NULL;
}

/* Close a context. It stays open if the daemon refuses that for now, so that its session is not left behind. */
static wasi_nn_error close_context(backend *on, nn_context *context) {
    wasi_nn_error error = close_session(on, context->session);
    if (error == not_found) /* it had expired */
        error = success;
    if (error != success && !on->is_lost)
        return error;
    context->is_open = context->has_answer = false;
    context->generation = (context->generation + 1) % (UINT32_MAX / CONFIG_MAX_CONTEXTS);
    context->on_text = NULL;
    free(context->prompt);
    context->prompt = NULL;
    text_free(&context->answer);
    text_free(&context->metadata);
    return error;
}

/* Return the place of a new context of a graph; the least recently used one of the graph is closed if it may be. */
static wasi_nn_error find_place(backend *on, graph g, const config *config, nn_context **place) {
    nn_context *empty = NULL, *oldest = NULL;
    uint32_t n_own = 0;
    for (uint32_t i = 0; i < CONFIG_MAX_CONTEXTS; i++) {
        nn_context *each = &on->contexts[i];
        if (!each->is_open) {
            empty = empty == NULL ? each : empty;
        } else if (each->graph == g) {
            n_own++;
            oldest = oldest == NULL || each->used_at < oldest->used_at ? each : oldest;
        }
    }
    if (empty != NULL && n_own < config->max_contexts) {
        *place = empty;
        return success;
    }
    if (!config->recycle || oldest == NULL)
        return fail(runtime_error, "%" PRIu32 " execution contexts of the graph are open, of %" PRIu32 "; close one",
                    n_own, config->max_contexts);
    *place = oldest;
    return close_context(on, oldest);
}

static wasi_nn_error open_context(backend *on, graph g, const char *text, uint32_t length,
                                  graph_execution_context *exec_ctx) {
    nn_context *place = NULL;
    config chosen;
    if (exec_ctx == NULL)
        return fail(invalid_argument, "there is no place for the execution context");
    if (g >= on->n_graphs)
        return fail(invalid_argument, "graph %" PRIu32 " does not exist", g);
    config_init(&chosen);
    wasi_nn_error error = config_copy(&chosen, &on->graphs[g].config) ? success : out_of_memory();
    if (error == success)
        error = read_config(on, &chosen, text, length, SCOPE_GRAPH);
    if (error == success)
        error = find_place(on, g, &chosen, &place);
    if (error == success)
        error = open_session(on, &on->graphs[g], &chosen, length > 0, place->session);
    if (error != success) {
        config_free(&chosen);
        return error;
    }
    config_free(&place->config);
    place->config = chosen;
    place->is_open = true;
    place->graph = g;
    place->used_at = on->n_calls;
    *exec_ctx = handle_of(on, place);
    return success;
}

wasi_nn_error init_execution_context_with_config(void *ctx, graph g, const char *config, uint32_t config_len,
                                                 graph_execution_context *exec_ctx) {
    backend *on = enter(ctx, "init_execution_context");
    return on == NULL ? invalid_argument : leave(on, open_context(on, g, config, config_len, exec_ctx));
}

wasi_nn_error init_execution_context(void *ctx, graph g, graph_execution_context *exec_ctx) {
    return init_execution_context_with_config(ctx, g, NULL, 0, exec_ctx);
}

wasi_nn_error close_execution_context(void *ctx, graph_execution_context exec_ctx) {
    backend *on = enter(ctx, "close_execution_context");
    if (on == NULL)
        return invalid_argument;
    nn_context *context = find_context(on, exec_ctx);
    return leave(on, context == NULL ? invalid_argument : close_context(on, context));
}

/* Return the number of bytes of the text in a tensor; see its description. */
static wasi_nn_error text_length(const tensor *given, size_t *length) {
    if (given == NULL || given->dimensions == NULL || given->dimensions->buf == NULL || given->data == NULL)
        return fail(invalid_argument, "the tensor, its dimensions or its data are NULL");
    if (given->dimensions->size == 0 || given->dimensions->size > MAX_DIMENSIONS)
        return fail(invalid_argument, "the tensor must have from 1 to %d dimensions", MAX_DIMENSIONS);
    uint64_t product = 1;
    for (uint32_t i = 0; i < given->dimensions->size; i++) {
        product *= given->dimensions->buf[i];
        if (product > MAX_TEXT)
            return fail(too_large, "the tensor has more than %d bytes", MAX_TEXT);
    }
    *length = strnlen((const char *)given->data, (size_t)product);
    return utf8_valid((const char *)given->data, *length) ? success : fail(invalid_encoding, "the text is not UTF-8");
}

static wasi_nn_error set_prompt(nn_context *context, const char *text, size_t length) {
    if (length == 0)
        return fail(invalid_argument, "the prompt is empty");
    char *prompt = strndup(text, length);
    if (prompt == NULL)
        return out_of_memory();
    free(context->prompt);
    context->prompt = prompt;
    context->n_prompt = length;
    return success;
}

/* Replace the parameters of a context's turns by those and the given ones. */
static wasi_nn_error set_parameters(backend *on, nn_context *context, const char *text, uint32_t length) {
    config changed;
    config_init(&changed);
    wasi_nn_error error = config_copy(&changed, &context->config) ? success : out_of_memory();
    if (error == success)
        error = read_config(on, &changed, text, length, SCOPE_TURN);
    config_free(error == success ? &context->config : &changed);
    if (error == success)
        context->config = changed;
    return error;
}

static wasi_nn_error take_input(backend *on, nn_context *context, uint32_t index, const tensor *given) {
    size_t length = 0;
    if (index > 1)
        return fail(invalid_argument, "input %" PRIu32 " does not exist; 0 is the prompt, 1 metadata", index);
    wasi_nn_error error = text_length(given, &length);
    if (error != success)
        return error;
    const char *text = (const char *)given->data;
    if (length == 1)
        log_line(on, nn_log_warning, "the input has one byte: the product of the dimensions is the size of a text");
    return index == 0 ? set_prompt(context, text, length) : set_parameters(on, context, text, (uint32_t)length);
}

wasi_nn_error set_input(void *ctx, graph_execution_context exec_ctx, uint32_t index, tensor *wasi_nn_tensor) {
    backend *on = enter(ctx, "set_input");
    if (on == NULL)
        return invalid_argument;
    nn_context *context = find_context(on, exec_ctx);
    return leave(on, context == NULL ? invalid_argument : take_input(on, context, index, wasi_nn_tensor));
}

/* Turns. */

/* Send the request to abort the turn, if it is wanted and the daemon knows the turn. */
static bool send_abort(backend *on) {
    nn_turn *turn = &on->turn;
    pthread_mutex_lock(&turn->mutex);
    bool is_due = turn->is_abort_wanted && turn->state == TURN_QUEUED;
    if (is_due)
        turn->state = TURN_ABORTED;
    pthread_mutex_unlock(&turn->mutex);
    if (!is_due)
        return true;
    begin_request(on, "abort");
    add_text(on, "session_id", turn->session, strlen(turn->session));
    return send_request(on) == success;
}

/* Called in the thread of the turn while it waits for the daemon. */
static bool on_wake(void *user) {
    backend *on = user;
    eventfd_t count;
    eventfd_read(on->socket.wake, &count);
    return send_abort(on);
}

static void begin_turn(backend *on, const nn_context *context) {
    pthread_mutex_lock(&on->turn.mutex);
    on->turn.state = TURN_SENT;
    on->turn.is_abort_wanted = false;
    on->turn.handle = handle_of(on, context);
    on->turn.session = context->session;
    pthread_mutex_unlock(&on->turn.mutex);
}

static void set_queued(backend *on) {
    pthread_mutex_lock(&on->turn.mutex);
    if (on->turn.state == TURN_SENT)
        on->turn.state = TURN_QUEUED;
    pthread_mutex_unlock(&on->turn.mutex);
}

static void leave_turn(backend *on) {
    eventfd_t count;
    pthread_mutex_lock(&on->turn.mutex);
    on->turn.state = NO_TURN;
    eventfd_read(on->socket.wake, &count); /* no abort of this turn reaches a later one */
    pthread_mutex_unlock(&on->turn.mutex);
}

static bool want_abort(backend *on, graph_execution_context handle) {
    pthread_mutex_lock(&on->turn.mutex);
    bool is_running = on->turn.state != NO_TURN && on->turn.handle == handle;
    if (is_running) {
        on->turn.is_abort_wanted = true;
        eventfd_write(on->socket.wake, 1);
    }
    pthread_mutex_unlock(&on->turn.mutex);
    return is_running;
}

wasi_nn_error inferencecenter_nn_abort(void *ctx, graph_execution_context exec_ctx) {
    last_error[0] = '\0';
    if (ctx == NULL)
        return fail(invalid_argument, "inferencecenter_nn_abort: there is no backend");
    return want_abort(ctx, exec_ctx) ? success
                                     : fail(invalid_argument, "execution context %" PRIu32 " runs no turn", exec_ctx);
}

wasi_nn_error inferencecenter_nn_set_text_callback(void *ctx, graph_execution_context exec_ctx,
                                                   inferencecenter_nn_text_callback callback, void *user) {
    backend *on = enter(ctx, "inferencecenter_nn_set_text_callback");
    if (on == NULL)
        return invalid_argument;
    nn_context *context = find_context(on, exec_ctx);
    if (context != NULL) {
        context->on_text = callback;
        context->user = user;
    }
    return leave(on, context == NULL ? invalid_argument : success);
}

static void take_text(backend *on, nn_context *context, const json_document *event) {
    size_t length;
    uint32_t content = json_member(event, 0, "content");
    if (content == JSON_NONE || event->values[content].kind != JSON_STRING)
        return;
    char *text = json_string(event, content, &length);
    bool had_room = !context->answer.failed;
    if (text == NULL) {
        context->answer.failed = true;
    } else {
        text_add(&context->answer, text, length);
        if (context->config.stream_stdout) {
            fwrite(text, 1, length, stdout);
            fflush(stdout);
        }
        if (context->on_text != NULL && length > 0)
            context->on_text(context->user, handle_of(on, context), text, (uint32_t)length);
        free(text);
    }
    if (had_room && context->answer.failed)
        want_abort(on, handle_of(on, context));
}

static void add_count(text_buffer *out, const char *name, const json_document *event, const char *counted) {
    char text[64];
    int64_t number = 0;
    uint32_t usage = json_member(event, 0, "usage");
    if (usage != JSON_NONE)
        json_integer(event, json_member(event, usage, counted), &number);
    snprintf(text, sizeof text, "\"%s\":%" PRId64 ",", name, number);
    text_add_string(out, text);
}

static wasi_nn_error end_turn(backend *on, nn_context *context, const json_document *event) {
    char *reason = text_of(event, "finish_reason");
    text_buffer *metadata = &context->metadata;
    if (reason == NULL)
        return out_of_memory();
    text_add(metadata, "{", 1);
    add_count(metadata, "input_tokens", event, "prompt_tokens");
    add_count(metadata, "output_tokens", event, "completion_tokens");
    add_count(metadata, "cached_tokens", event, "cached_tokens");
    text_add_string(metadata, "\"finish_reason\":");
    text_add_json(metadata, reason, strlen(reason));
    text_add(metadata, "}", 1);
    if (metadata->failed) {
        free(reason);
        return out_of_memory();
    }
    context->has_answer = true;
    log_warnings(on, event);
    wasi_nn_error error = success;
    if (context->answer.failed)
        error = fail(too_large, "the answer has more than %d bytes, or memory is used up; it was cut", MAX_TEXT);
    else if (strcmp(reason, "context_full") == 0)
        error = fail(context_full, "the context is full; the output is incomplete");
    else if (strcmp(reason, "time") == 0)
        error = fail(timeout, "the turn reached max_time_ms; the output is incomplete");
    else if (strcmp(reason, "quota_exceeded") == 0)
        error = fail(security, "the day's quota is used up; the output is incomplete");
    else if (strcmp(reason, "aborted") == 0)
        error = fail(runtime_error, "the turn was aborted; the output is incomplete");
    free(reason);
    return error;
}

/* Receive the events of a turn up to its end; `request` began it. */
static wasi_nn_error follow_turn(backend *on, nn_context *context, uint64_t request) {
    for (;;) {
        json_document event;
        wasi_nn_error error = receive(on, &event);
        if (error != success)
            return error;
        bool is_own = has_text(&event, "session_id", context->session), is_error = has_text(&event, "op", "error");
        bool is_failure = is_own && is_error && json_member(&event, 0, "turn_id") != JSON_NONE;
        bool is_end = true;
        if (is_failure || (is_error && answers(&event, request)))
            error = refused(&event);
        else if (is_own && has_text(&event, "op", "end"))
            error = end_turn(on, context, &event);
        else if (is_own && has_text(&event, "op", "session_detached"))
            error = fail(runtime_error, "another connection has taken over the session");
        else
            is_end = false;
        if (is_own && has_text(&event, "op", "queued"))
            set_queued(on);
        else if (is_own && has_text(&event, "op", "token"))
            take_text(on, context, &event);
        json_free(&event);
        if (is_end)
            return error;
        if (!send_abort(on))
            return lost(on);
    }
}

static wasi_nn_error run_turn(backend *on, nn_context *context, const config *config) {
    if (context->prompt == NULL)
        return fail(invalid_argument, "there is no prompt: set input 0 before each turn");
    context->has_answer = false;
    text_clear(&context->answer);
    text_clear(&context->metadata);
    context->answer.limit = context->metadata.limit = MAX_TEXT;
    begin_request(on, "infer");
    add_text(on, "session_id", context->session, strlen(context->session));
    add_text(on, "prompt", context->prompt, context->n_prompt);
    config_add_parameters(config, &on->request);
    config_add_constraints(config, &on->request);
    uint64_t request = on->n_requests;
    begin_turn(on, context);
    wasi_nn_error error = send_request(on);
    if (error == success) {
        free(context->prompt);
        context->prompt = NULL;
        error = follow_turn(on, context, request);
    }
    leave_turn(on);
    return error;
}

wasi_nn_error compute(void *ctx, graph_execution_context exec_ctx) {
    backend *on = enter(ctx, "compute");
    if (on == NULL)
        return invalid_argument;
    nn_context *context = find_context(on, exec_ctx);
    return leave(on, context == NULL ? invalid_argument : run_turn(on, context, &context->config));
}

static wasi_nn_error copy_output(const char *text, size_t length, void *output, uint32_t *output_size) {
    if (output_size == NULL || (output == NULL && *output_size > 0))
        return fail(invalid_argument, "there is no buffer or no size of it");
    uint32_t n_buffer = *output_size;
    *output_size = (uint32_t)length;
    if (n_buffer < length)
        return fail(too_large, "the output has %zu bytes, the buffer %" PRIu32, length, n_buffer);
    if (length > 0)
        memcpy(output, text, length);
    if (n_buffer > length)
        ((char *)output)[length] = '\0';
    return success;
}

static wasi_nn_error copy_answer(const nn_context *context, uint32_t index, void *output, uint32_t *output_size) {
    if (index > 1)
        return fail(invalid_argument, "output %" PRIu32 " does not exist; 0 is the text, 1 metadata", index);
    if (!context->has_answer)
        return fail(invalid_argument, "there is no output: call compute first");
    const text_buffer *text = index == 0 ? &context->answer : &context->metadata;
    return copy_output(text->data, text->length, output, output_size);
}

wasi_nn_error get_output(void *ctx, graph_execution_context exec_ctx, uint32_t index, tensor_data output_tensor,
                         uint32_t *output_tensor_size) {
    backend *on = enter(ctx, "get_output");
    if (on == NULL)
        return invalid_argument;
    nn_context *context = find_context(on, exec_ctx);
    return leave(on, context == NULL ? invalid_argument
                                     : copy_answer(context, index, output_tensor, output_tensor_size));
}

static wasi_nn_error run_once(backend *on, nn_context *context, const tensor *input, const char *options,
                              uint32_t length) {
    config changed;
    wasi_nn_error error = take_input(on, context, 0, input);
    config_init(&changed);
    if (error == success && !config_copy(&changed, &context->config))
        error = out_of_memory();
    if (error == success)
        error = read_config(on, &changed, options, length, SCOPE_TURN);
    if (error == success)
        error = run_turn(on, context, &changed);
    config_free(&changed);
    return error;
}

wasi_nn_error run_inference(void *ctx, graph_execution_context exec_ctx, uint32_t index, tensor *input_tensor,
                            tensor_data output_tensor, uint32_t *output_tensor_size, const char *options,
                            uint32_t options_len) {
    backend *on = enter(ctx, "run_inference");
    if (on == NULL)
        return invalid_argument;
    nn_context *context = find_context(on, exec_ctx);
    if (context == NULL)
        return leave(on, invalid_argument);
    if (index != 0)
        return leave(on, fail(invalid_argument, "input %" PRIu32 " is no prompt; 0 is", index));
    if (output_tensor_size == NULL || (output_tensor == NULL && *output_tensor_size > 0))
        return leave(on, fail(invalid_argument, "there is no buffer or no size of it"));
    wasi_nn_error error = run_once(on, context, input_tensor, options, options_len);
    return leave(on, error == success ? copy_answer(context, 0, output_tensor, output_tensor_size) : error);
}

static wasi_nn_error copy_status(backend *on, uint32_t kind, char *output, uint32_t *output_size) {
    static const char *const kinds[] = {"queue", "memory", "sessions", "performance", "model"};
    json_document reply;
    if (kind >= sizeof kinds / sizeof *kinds)
        return fail(invalid_argument, "status %" PRIu32 " does not exist; kinds are from 0 to 4", kind);
    begin_request(on, "status");
    add_text(on, "type", kinds[kind], strlen(kinds[kind]));
    wasi_nn_error error = ask(on, "status", &reply);
    if (error != success)
        return error;
    uint32_t values = json_member(&reply, 0, "values");
    if (values == JSON_NONE || reply.values[values].kind != JSON_OBJECT) {
        error = fail(runtime_error, "the daemon has sent no readings");
    } else {
        const json_value *found = &reply.values[values];
        error = copy_output(reply.text + found->start, found->end - found->start, output, output_size);
    }
    json_free(&reply);
    return error;
}

wasi_nn_error get_backend_status(void *ctx, uint32_t kind, char *output, uint32_t *output_size) {
    backend *on = enter(ctx, "get_backend_status");
    return on == NULL ? invalid_argument : leave(on, copy_status(on, kind, output, output_size));
}
