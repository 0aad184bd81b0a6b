/* The configuration that a program gives as JSON. Its keys are in config_keys.inc, which is generated. */
#ifndef NN_CONFIG_H
#define NN_CONFIG_H

#include "inferencecenter_nn.h"
#include "json.h"

#define CONFIG_MAX_BYTES 65536
#define CONFIG_MAX_PARAMETERS 64
#define CONFIG_MAX_CONTEXTS 64
#define CONFIG_MAX_WARNINGS 64

enum { CONSTRAINT_THINKING, CONSTRAINT_JSON_SCHEMA, CONSTRAINT_GRAMMAR, CONSTRAINT_REGEX, N_CONSTRAINTS };
enum { SESSION_SYSTEM, SESSION_MODE, SESSION_ON_FULL, SESSION_TTL_S, N_SESSION_FIELDS };

typedef struct {
    /* Values as JSON, each NULL if it is not given. */
    char *parameters[CONFIG_MAX_PARAMETERS];
    char *constraints[N_CONSTRAINTS];
    char *session[N_SESSION_FIELDS];
    char *socket; /* the path as it is */
    uint32_t max_contexts;
    bool recycle;
    bool stream_stdout;
    int log_level; /* inferencecenter_nn_log_level; -1 for none */
} config;

/* What a configuration applies to. */
typedef enum { SCOPE_BACKEND, SCOPE_GRAPH, SCOPE_TURN } config_scope;

/* What reading has found: a line for each key without effect, and why it failed. */
typedef struct {
    text_buffer warnings;
    uint32_t n_warnings;
    char why[512];
} config_report;

void config_init(config *config);
void config_free(config *config);

/* Replace `to`, which is initialized, by a copy; false without memory. */
bool config_copy(config *to, const config *from);

/* Apply a JSON text to a configuration; NULL with length 0 changes nothing. After an error it is partly applied. */
wasi_nn_error config_read(config *config, const char *text, size_t length, config_scope scope, config_report *report);

/* Add `"params":{…}` and the constraints of a turn, or the fields of a session, each after a comma. */
void config_add_parameters(const config *config, text_buffer *out);
void config_add_constraints(const config *config, text_buffer *out);
void config_add_session(const config *config, text_buffer *out);

#endif
