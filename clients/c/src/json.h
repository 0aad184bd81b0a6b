/* A bounded JSON reader and writer. The reader keeps the text, and an index of its values. */
#ifndef NN_JSON_H
#define NN_JSON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define JSON_MAX_DEPTH 64
#define JSON_MAX_VALUES 65536
#define JSON_NONE UINT32_MAX

typedef enum { JSON_NULL, JSON_FALSE, JSON_TRUE, JSON_NUMBER, JSON_STRING, JSON_ARRAY, JSON_OBJECT } json_kind;

/* A value: its text is from `start` to `end`, a string's with its quotes. The values inside it follow it in the index
 * up to `next`, those of an object in pairs of name and value. */
typedef struct {
    json_kind kind;
    uint32_t start;
    uint32_t end;
    uint32_t next;
} json_value;

typedef struct {
    const char *text;
    json_value *values;
    uint32_t n_values;
    uint32_t capacity;
} json_document;

/* Parse a text, which must outlive the document; value 0 is the whole. Returns false for invalid JSON, with a constant
 * description in `why` and the position in `at`. */
bool json_parse(json_document *document, const char *text, size_t length, const char **why, size_t *at);
void json_free(json_document *document);

/* Return the value of a member of an object, the last one of its name, or JSON_NONE. */
uint32_t json_member(const json_document *document, uint32_t object, const char *name);

/* Iterate over the members of an object or the elements of an array: the first, and the one after a value. Both return
 * JSON_NONE at the end; names and values of an object alternate. */
uint32_t json_first(const json_document *document, uint32_t container);
uint32_t json_after(const json_document *document, uint32_t container, uint32_t value);

/* Return the text of a string without its escapes, NUL-terminated and to be freed; NULL for another value or without
 * memory. */
char *json_string(const json_document *document, uint32_t value, size_t *length);

/* Whether a string equals a text. */
bool json_equals(const json_document *document, uint32_t value, const char *text);

/* Read an integer without a fraction or an exponent; false for any other value. */
bool json_integer(const json_document *document, uint32_t value, int64_t *number);

/* Whether a text is valid UTF-8. */
bool utf8_valid(const char *text, size_t length);

/* Replace control characters, and bytes that are not UTF-8, by question marks: what remains is one line of text. */
void text_sanitize(char *text);

/* A growing text of at most `limit` bytes; NUL-terminated unless it is empty. `failed` is set if it would have become
 * longer, or memory is used up, and stays set. */
typedef struct {
    char *data;
    size_t length;
    size_t capacity;
    size_t limit;
    bool failed;
} text_buffer;

void text_add(text_buffer *text, const char *bytes, size_t length);
void text_add_string(text_buffer *text, const char *string);
/* Add valid UTF-8 as a JSON string with quotes. */
void text_add_json(text_buffer *text, const char *bytes, size_t length);
void text_clear(text_buffer *text);
void text_free(text_buffer *text);

#endif
