/* Feeds the JSON reader, the configuration and the WebSocket client with mutated texts and frames; the sanitizers find
 * what goes wrong. As a program it makes as many cases as its argument says, the same ones each time. With LIBFUZZER it is
 * a target of clang's libFuzzer, whose first byte chooses what is fed. */
#define _GNU_SOURCE
#include "config.h"
#include "json.h"
#include "websocket.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define MAX_CASE 2048

/* Parse a copy with exactly its bytes, and read every value. */
static bool parse(const char *text, size_t length) {
    char *copy = malloc(length);
    json_document document;
    const char *why = NULL;
    size_t at = 0;
    memcpy(copy, text, length);
    bool valid = json_parse(&document, copy, length, &why, &at);
    if (!valid && (why == NULL || at > length))
        abort();
    for (uint32_t i = 0; valid && i < document.n_values; i++) {
        int64_t number;
        size_t n_bytes = 0;
        char *string = json_string(&document, i, &n_bytes);
        if (string != NULL && !utf8_valid(string, n_bytes))
            abort();
        free(string);
        json_integer(&document, i, &number);
        json_member(&document, i, "a");
    }
    if (valid)
        json_free(&document);
    free(copy);
    return valid;
}

static void configure(const char *text, size_t length) {
    config read;
    config_report report = {0};
    text_buffer sent = {.limit = CONFIG_MAX_BYTES};
    char *copy = malloc(length);
    memcpy(copy, text, length);
    config_init(&read);
    if (config_read(&read, copy, length, SCOPE_BACKEND, &report) == success) {
        config_add_parameters(&read, &sent);
        config_add_session(&read, &sent);
    }
    config_free(&read);
    text_free(&report.warnings);
    text_free(&sent);
    free(copy);
}

/* Receive what a daemon sends, during calls or between them. */
static void receive(const char *bytes, size_t length, bool between_calls) {
    int ends[2];
    websocket *client = malloc(sizeof *client);
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0)
        abort();
    if (write(ends[1], bytes, length) != (ssize_t)length)
        abort();
    shutdown(ends[1], SHUT_WR);
    websocket_init(client, ends[0]);
    if (between_calls)
        websocket_service(client);
    else
        while (websocket_receive(client)) {
        }
    websocket_close(client);
    close(ends[1]);
    free(client);
}

#ifdef LIBFUZZER
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    const char *bytes = (const char *)data + 1;
    if (size < 2)
        return 0;
    switch (data[0] % 4) {
    case 0:
        parse(bytes, size - 1);
        break;
    case 1:
        configure(bytes, size - 1);
        break;
    default:
        receive(bytes, size - 1, data[0] % 4 == 2);
    }
    return 0;
}
#else
static uint64_t state = 88172645463325252u;

static uint32_t random_below(uint32_t limit) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (uint32_t)(state >> 32) % limit;
}

static const char *const texts[] = {
    "{\"op\":\"token\",\"session_id\":\"s\",\"content\":\"caf\\u00e9 \\ud83d\\ude00 \\\"x\\\"\"}",
    "[1,-2.5e-3,[true,false,null],{\"a\":{\"b\":[]}},\"\\u0000\\n\"]",
    "{\"sampling\":{\"temp\":0.5,\"stop\":[\"a\",\"b\"]},\"logging\":{\"level\":\"debug\"}}",
    "\"\\udc00\"",
    "{\"a\":1,\"a\":2}",
};

static size_t mutated(const void *from, size_t length, char *to) {
    static const char interesting[] = "\"\\{}[],:u0123456789eE+-.tfn \x7f\x80\xc3\xe2\xed\xf0\xff";
    memcpy(to, from, length);
    for (uint32_t i = random_below(6); i > 0; i--) {
        uint32_t at = random_below((uint32_t)length + 1);
        switch (random_below(4)) {
        case 0:
            if (at < length)
                to[at] = interesting[random_below(sizeof interesting)];
            break;
        case 1:
            length = at;
            break;
        case 2:
            if (length < MAX_CASE / 2) {
                memmove(to + at + 1, to + at, length - at);
                to[at] = (char)random_below(256);
                length++;
            }
            break;
        default:
            if (length < MAX_CASE / 2) {
                memmove(to + length, to, length);
                length *= 2;
            }
        }
    }
    return length;
}

static void check_round_trip(void) {
    char bytes[64];
    size_t length = random_below(sizeof bytes), n_read;
    for (size_t i = 0; i < length; i++)
        bytes[i] = (char)random_below(128);
    text_buffer text = {.limit = MAX_CASE};
    text_add_json(&text, bytes, length);
    json_document document;
    const char *why;
    size_t at;
    if (!json_parse(&document, text.data, text.length, &why, &at))
        abort();
    char *read = json_string(&document, 0, &n_read);
    if (read == NULL || n_read != length || memcmp(read, bytes, length) != 0)
        abort();
    free(read);
    json_free(&document);
    text_free(&text);
}

static void nest(void) {
    for (int depth = JSON_MAX_DEPTH - 2; depth < JSON_MAX_DEPTH + 3; depth++) {
        char text[2 * (JSON_MAX_DEPTH + 3)];
        memset(text, '[', (size_t)depth);
        memset(text + depth, ']', (size_t)depth);
        if (parse(text, 2 * (size_t)depth) != (depth <= JSON_MAX_DEPTH))
            abort();
    }
    char *deep = malloc(1 << 20);
    memset(deep, '[', 1 << 20);
    if (parse(deep, 1 << 20))
        abort();
    for (size_t i = 0; i < 1 << 20; i += 2)
        memcpy(deep + i, "0,", 2);
    deep[0] = '[';
    memcpy(deep + (1 << 20) - 2, "0]", 2);
    if (parse(deep, 1 << 20))
        abort();
    free(deep);
}

static const struct {
    size_t length;
    const char *bytes;
} frames[] = {
    {7, "\x81\x05hello"},
    {11, "\x01\x03hel\x89\x00\x80\x02lo"},
    {4, "\x88\x02\x03\xe8"},
    {12, "\x81\x7e\x00\x08" "01234567"},
    {10, "\x81\x7f\xff\xff\xff\xff\xff\xff\xff\xff"},
    {8, "\x81\x85" "abcdxy"},
};

int main(int count, char **arguments) {
    char text[2 * MAX_CASE];
    signal(SIGPIPE, SIG_IGN);
    nest();
    for (long i = 0; i < (count > 1 ? strtol(arguments[1], NULL, 10) : 1000); i++) {
        const char *seed = texts[random_below(sizeof texts / sizeof *texts)];
        size_t length = mutated(seed, strlen(seed), text);
        parse(text, length);
        configure(text, length);
        check_round_trip();
        uint32_t frame = random_below(sizeof frames / sizeof *frames);
        length = mutated(frames[frame].bytes, frames[frame].length, text);
        receive(text, length, random_below(4) == 0);
    }
    return 0;
}
#endif
