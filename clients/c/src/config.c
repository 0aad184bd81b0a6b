#define _GNU_SOURCE
#include "config.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SHOWN_BYTES 64
#define MAX_NAME 128

typedef enum { KIND_INTEGER, KIND_BOOLEAN, KIND_STRING, KIND_OBJECT_OR_STRING, KIND_ANY } key_kind;
typedef enum { USE_PARAMETER, USE_SESSION, USE_GUEST, USE_NO_EFFECT } key_use;

typedef struct {
    const char *path; /* the name, after its group and a dot if it has one */
    key_kind kind;
    key_use use;
    int64_t lowest, highest;
    const char *options; /* allowed strings, separated by spaces; empty for any */
    const char *allowed;
    const char *meaning;
} config_key;

static const char *const groups[] = {
#define NN_GROUP(name) name,
#define NN_PARAMETER(name)
#define NN_ALIAS(given, name)
#define NN_KEY(path, kind, use, lowest, highest, options, allowed, meaning)
#include "config_keys.inc"
#undef NN_GROUP
#undef NN_PARAMETER
};

static const char *const parameters[] = {
#define NN_GROUP(name)
#define NN_PARAMETER(name) name,
#include "config_keys.inc"
#undef NN_PARAMETER
#undef NN_ALIAS
};

static const struct {
    const char *given, *name;
} aliases[] = {
#define NN_PARAMETER(name)
#define NN_ALIAS(given, name) {given, name},
#include "config_keys.inc"
#undef NN_ALIAS
#undef NN_KEY
};

static const config_key keys[] = {
#define NN_ALIAS(given, name)
#define NN_KEY(path, kind, use, lowest, highest, options, allowed, meaning)                                           \
    {path, kind, use, lowest, highest, options, allowed, meaning},
#include "config_keys.inc"
};

#define N_PARAMETERS (sizeof parameters / sizeof *parameters)
_Static_assert(N_PARAMETERS <= CONFIG_MAX_PARAMETERS, "raise CONFIG_MAX_PARAMETERS");

static const char *const constraint_names[] = {"thinking", "json_schema", "grammar", "regex"};
static const char *const session_names[] = {"system", "mode", "on_full", "ttl_s"};

typedef struct {
    config *config;
    const json_document *document;
    config_scope scope;
    config_report *report;
} config_reader;

void config_init(config *config) {
    memset(config, 0, sizeof *config);
    config->max_contexts = CONFIG_MAX_CONTEXTS;
    config->log_level = nn_log_warning;
}

static void free_all(char **values, size_t n_values) {
    for (size_t i = 0; i < n_values; i++)
        free(values[i]);
}

void config_free(config *config) {
    free_all(config->parameters, CONFIG_MAX_PARAMETERS);
    free_all(config->constraints, N_CONSTRAINTS);
    free_all(config->session, N_SESSION_FIELDS);
    free(config->socket);
    config_init(config);
}

static bool copy_all(char **to, char *const *from, size_t n_values) {
    bool copied = true;
    for (size_t i = 0; i < n_values; i++) {
        to[i] = from[i] == NULL ? NULL : strdup(from[i]);
        copied = copied && (from[i] == NULL || to[i] != NULL);
    }
    return copied;
}

bool config_copy(config *to, const config *from) {
    config_free(to);
    *to = *from;
    bool copied = copy_all(to->parameters, from->parameters, CONFIG_MAX_PARAMETERS);
    copied = copy_all(to->constraints, from->constraints, N_CONSTRAINTS) && copied;
    copied = copy_all(to->session, from->session, N_SESSION_FIELDS) && copied;
    return copy_all(&to->socket, &from->socket, 1) && copied;
}

static size_t find(const char *const *names, size_t n_names, const char *name) {
    size_t i = 0;
    while (i < n_names && strcmp(names[i], name) != 0)
        i++;
    return i;
}

#define FIND(names, name) find(names, sizeof names / sizeof *names, name)
#define COUNT(names) (sizeof names / sizeof *names)

/* Return a string without its escapes, to be freed; NULL for another value, one with a NUL in it, or without memory. */
static char *c_string(const json_document *document, uint32_t value) {
    size_t length;
    char *string = json_string(document, value, &length);
    if (string != NULL && strlen(string) != length) {
        free(string);
        return NULL;
    }
    return string;
}

/* Copy the usual name of a key: with underscores, and without its alias. One that is too long for any key is cut, and
 * one with a NUL in it becomes that of no key. */
static void canonical_name(const json_document *document, uint32_t key, char name[MAX_NAME]) {
    char *given = c_string(document, key);
    snprintf(name, MAX_NAME, "%s", given == NULL ? "?" : given);
    free(given);
    for (char *at = name; *at != '\0'; at++)
        if (*at == '-')
            *at = '_';
    for (size_t i = 0; i < COUNT(aliases); i++)
        if (strcmp(aliases[i].given, name) == 0) {
            snprintf(name, MAX_NAME, "%s", aliases[i].name);
            return;
        }
}

static void warn(config_reader *in, const char *path, const char *why) {
    config_report *report = in->report;
    if (report->n_warnings >= CONFIG_MAX_WARNINGS)
        return;
    report->n_warnings++;
    report->warnings.limit = CONFIG_MAX_BYTES;
    /* A name may have any character; the log has one line for each. */
    for (const char *at = path; *at != '\0'; at++)
        text_add(&report->warnings, (unsigned char)*at < 0x20 ? "?" : at, 1);
    text_add_string(&report->warnings, " has no effect: ");
    text_add_string(&report->warnings, why);
    text_add_string(&report->warnings, "\n");
}

/* Return the JSON of a value, to be freed. */
static char *raw_value(const json_document *document, uint32_t value) {
    const json_value *found = &document->values[value];
    return strndup(document->text + found->start, found->end - found->start);
}

static wasi_nn_error out_of_memory(config_report *report) {
    snprintf(report->why, sizeof report->why, "memory is used up");
    return runtime_error;
}

static wasi_nn_error wrong(config_reader *in, const char *path, const char *allowed, uint32_t value,
                           const char *meaning) {
    char *shown = raw_value(in->document, value);
    size_t n_shown = shown == NULL ? 0 : strlen(shown);
    const char *rest = n_shown > SHOWN_BYTES ? "..." : "";
    /* Not a part of a character. */
    if (n_shown > SHOWN_BYTES)
        for (n_shown = SHOWN_BYTES; n_shown > 0 && (shown[n_shown] & 0xC0) == 0x80; n_shown--) {
        }
    snprintf(in->report->why, sizeof in->report->why, "%s must be %s, not %.*s%s. %s", path, allowed, (int)n_shown,
             shown == NULL ? "" : shown, rest, meaning);
    free(shown);
    return invalid_argument;
}

static bool is_option(const char *options, const char *given) {
    size_t length = strlen(given);
    for (const char *at = options; *at != '\0'; at += strspn(at, " ")) {
        size_t n_option = strcspn(at, " ");
        if (n_option == length && memcmp(at, given, length) == 0)
            return true;
        at += n_option;
    }
    return false;
}

static bool accepts(const config_key *key, const json_document *document, uint32_t value) {
    json_kind kind = document->values[value].kind;
    int64_t number;
    switch (key->kind) {
    case KIND_INTEGER:
        return json_integer(document, value, &number) && number >= key->lowest && number <= key->highest;
    case KIND_BOOLEAN:
        return kind == JSON_TRUE || kind == JSON_FALSE;
    case KIND_STRING: {
        if (*key->options == '\0')
            return kind == JSON_STRING;
        char *given = c_string(document, value);
        bool accepted = given != NULL && is_option(key->options, given);
        free(given);
        return accepted;
    }
    case KIND_OBJECT_OR_STRING:
        return kind == JSON_OBJECT || kind == JSON_STRING;
    case KIND_ANY:
        return true;
    }
    return false;
}

static wasi_nn_error set_raw(config_reader *in, char **field, char *raw) {
    if (raw == NULL)
        return out_of_memory(in->report);
    free(*field);
    *field = raw;
    return success;
}

/* A schema may be given as a string of JSON. */
static wasi_nn_error set_schema(config_reader *in, uint32_t value, const config_key *key) {
    char **field = &in->config->constraints[CONSTRAINT_JSON_SCHEMA];
    if (in->document->values[value].kind != JSON_STRING)
        return set_raw(in, field, raw_value(in->document, value));
    json_document parsed;
    const char *why;
    size_t length, at;
    char *text = json_string(in->document, value, &length);
    if (text == NULL)
        return out_of_memory(in->report);
    if (!json_parse(&parsed, text, length, &why, &at)) {
        free(text);
        return wrong(in, "json_schema", key->allowed, value, why);
    }
    json_free(&parsed);
    return set_raw(in, field, text);
}

static wasi_nn_error set_log_level(config_reader *in, uint32_t value) {
    static const struct {
        const char *name;
        int level;
    } levels[] = {{"none", -1},
                  {"error", nn_log_error},
                  {"warn", nn_log_warning},
                  {"warning", nn_log_warning},
                  {"info", nn_log_info},
                  {"debug", nn_log_debug}};
    for (size_t i = 0; i < COUNT(levels); i++)
        if (json_equals(in->document, value, levels[i].name))
            in->config->log_level = levels[i].level;
    return success;
}

static wasi_nn_error set_lifetime(config_reader *in, uint32_t value) {
    char text[32];
    int64_t idle_ms = 0;
    json_integer(in->document, value, &idle_ms);
    snprintf(text, sizeof text, "%" PRId64 ".%03d", idle_ms / 1000, (int)(idle_ms % 1000));
    return set_raw(in, &in->config->session[SESSION_TTL_S], strdup(text));
}

static wasi_nn_error set_value(config_reader *in, const config_key *key, const char *name, uint32_t value) {
    config *config = in->config;
    bool is_true = in->document->values[value].kind == JSON_TRUE;
    int64_t number = 0;
    json_integer(in->document, value, &number);
    size_t constraint = FIND(constraint_names, name), session = FIND(session_names, name);
    if (constraint == CONSTRAINT_JSON_SCHEMA)
        return set_schema(in, value, key);
    if (constraint < N_CONSTRAINTS)
        return set_raw(in, &config->constraints[constraint], raw_value(in->document, value));
    if (session < N_SESSION_FIELDS)
        return set_raw(in, &config->session[session], raw_value(in->document, value));
    if (strcmp(name, "context_shifting") == 0 || strcmp(name, "ctx_shift") == 0)
        return set_raw(in, &config->session[SESSION_ON_FULL], strdup(is_true ? "\"shift\"" : "\"stop\""));
    if (strcmp(name, "idle_timeout_ms") == 0)
        return set_lifetime(in, value);
    if (strcmp(name, "level") == 0)
        return set_log_level(in, value);
    if (strcmp(name, "max_sessions") == 0)
        config->max_contexts = number < CONFIG_MAX_CONTEXTS ? (uint32_t)number : CONFIG_MAX_CONTEXTS;
    else if (strcmp(name, "auto_cleanup") == 0)
        config->recycle = is_true;
    else if (strcmp(name, "stream_stdout") == 0)
        config->stream_stdout = is_true;
    else if (strcmp(name, "enable_debug") == 0 || strcmp(name, "enable_debug_log") == 0)
        config->log_level = is_true ? nn_log_debug : config->log_level;
    /* `max_concurrent` holds as it is: a backend runs one turn at a time. */
    return success;
}

static const config_key *find_key(const char *path) {
    for (size_t i = 0; i < COUNT(keys); i++)
        if (strcmp(keys[i].path, path) == 0)
            return &keys[i];
    return NULL;
}

static const config_key *find_key_in(const char *group, const char *name) {
    char path[2 * MAX_NAME];
    if (*group == '\0' || strcmp(group, "model") == 0) {
        const config_key *key = find_key(name);
        if (key != NULL || *group != '\0')
            return key;
        group = "backend";
    }
    snprintf(path, sizeof path, "%s.%s", group, name);
    return find_key(path);
}

static bool has_parameters(const char *group) {
    static const char *const with_parameters[] = {"", "model", "sampling", "stopping"};
    return FIND(with_parameters, group) < COUNT(with_parameters);
}

static wasi_nn_error read_key(config_reader *in, const char *group, const char *name, uint32_t value) {
    char path[2 * MAX_NAME];
    snprintf(path, sizeof path, "%s%s%s", group, *group == '\0' ? "" : ".", name);
    if (in->document->values[value].kind == JSON_NULL)
        return success;
    size_t parameter = has_parameters(group) ? FIND(parameters, name) : N_PARAMETERS;
    if (parameter < N_PARAMETERS)
        return set_raw(in, &in->config->parameters[parameter], raw_value(in->document, value));
    if (*group == '\0' && strcmp(name, "socket") == 0 && in->scope == SCOPE_BACKEND) {
        char *path_of_socket = c_string(in->document, value);
        return path_of_socket == NULL ? wrong(in, "socket", "a path", value, "") :
                                        set_raw(in, &in->config->socket, path_of_socket);
    }
    const config_key *key = find_key_in(group, name);
    if (key == NULL) {
        warn(in, path, "It is not known.");
        return success;
    }
    if (!accepts(key, in->document, value))
        return wrong(in, path, key->allowed, value, key->meaning);
    if (key->use == USE_NO_EFFECT)
        warn(in, path, key->meaning);
    else if (in->scope == SCOPE_TURN && key->use != USE_PARAMETER)
        warn(in, path, "The context was opened with it; metadata and options change parameters only.");
    else
        return set_value(in, key, name, value);
    return success;
}

static wasi_nn_error read_members(config_reader *in, const char *group, uint32_t object, bool with_groups) {
    const json_document *document = in->document;
    wasi_nn_error error = success;
    for (uint32_t key = json_first(document, object); key != JSON_NONE && error == success;) {
        uint32_t value = document->values[key].next;
        char name[MAX_NAME];
        canonical_name(document, key, name);
        bool is_group = *group == '\0' && FIND(groups, name) < COUNT(groups);
        if (is_group && with_groups)
            error = document->values[value].kind == JSON_OBJECT
                        ? read_members(in, name, value, false)
                        : wrong(in, name, "an object", value, "");
        else if (!is_group && !with_groups)
            error = read_key(in, group, name, value);
        key = json_after(document, object, value);
    }
    return error;
}

wasi_nn_error config_read(config *config, const char *text, size_t length, config_scope scope, config_report *report) {
    json_document document;
    const char *why;
    size_t at;
    if (text == NULL || length == 0)
        return text == NULL && length != 0 ? invalid_argument : success;
    if (length > CONFIG_MAX_BYTES) {
        snprintf(report->why, sizeof report->why, "the configuration has %zu bytes; %d are allowed", length,
                 CONFIG_MAX_BYTES);
        return too_large;
    }
    while (length > 0 && text[length - 1] == '\0')
        length--;
    if (!json_parse(&document, text, length, &why, &at)) {
        snprintf(report->why, sizeof report->why, "the configuration is not JSON: %s, at byte %zu", why, at);
        return invalid_encoding;
    }
    wasi_nn_error error = success;
    config_reader in = {config, &document, scope, report};
    if (document.values[0].kind != JSON_OBJECT) {
        snprintf(report->why, sizeof report->why, "the configuration must be a JSON object");
        error = invalid_argument;
    }
    /* Groups take precedence over the keys at the top. */
    if (error == success)
        error = read_members(&in, "", 0, false);
    if (error == success)
        error = read_members(&in, "", 0, true);
    json_free(&document);
    return error;
}

static void add_field(text_buffer *out, const char *name, const char *value) {
    text_add_json(out, name, strlen(name));
    text_add(out, ":", 1);
    text_add_string(out, value);
}

static void add_fields(text_buffer *out, const char *const *names, char *const *values, size_t n_values) {
    for (size_t i = 0; i < n_values; i++)
        if (values[i] != NULL) {
            text_add(out, ",", 1);
            add_field(out, names[i], values[i]);
        }
}

void config_add_parameters(const config *config, text_buffer *out) {
    const char *before = ",\"params\":{";
    for (size_t i = 0; i < N_PARAMETERS; i++)
        if (config->parameters[i] != NULL) {
            text_add_string(out, before);
            add_field(out, parameters[i], config->parameters[i]);
            before = ",";
        }
    if (*before == ',' && before[1] == '\0')
        text_add(out, "}", 1);
}

void config_add_constraints(const config *config, text_buffer *out) {
    add_fields(out, constraint_names, config->constraints, N_CONSTRAINTS);
}

void config_add_session(const config *config, text_buffer *out) {
    add_fields(out, session_names, config->session, N_SESSION_FIELDS);
}
