#include "json.h"

#include <stdlib.h>
#include <string.h>

typedef struct {
    json_document *document;
    const char *text;
    size_t length;
    size_t at;
    const char *why;
} reader;

static bool fail(reader *in, const char *why) {
    in->why = why;
    return false;
}

static void skip_space(reader *in) {
    while (in->at < in->length && memchr(" \t\n\r", in->text[in->at], 4) != NULL)
        in->at++;
}

static bool at_byte(const reader *in, char byte) { return in->at < in->length && in->text[in->at] == byte; }

static uint32_t add_value(reader *in, json_kind kind) {
    json_document *document = in->document;
    if (document->n_values == document->capacity) {
        uint32_t capacity = document->capacity == 0 ? 64 : document->capacity * 2;
        if (document->capacity >= JSON_MAX_VALUES) {
            in->why = "it has too many values";
            return JSON_NONE;
        }
        json_value *values = realloc(document->values, capacity * sizeof *values);
        if (values == NULL) {
            in->why = "memory is used up";
            return JSON_NONE;
        }
        document->values = values;
        document->capacity = capacity;
    }
    document->values[document->n_values] = (json_value){.kind = kind, .start = (uint32_t)in->at};
    return document->n_values++;
}

static void end_value(reader *in, uint32_t index) {
    in->document->values[index].end = (uint32_t)in->at;
    in->document->values[index].next = in->document->n_values;
}

static int hex_digit(char digit) {
    if (digit >= '0' && digit <= '9')
        return digit - '0';
    if (digit >= 'a' && digit <= 'f')
        return digit - 'a' + 10;
    return digit >= 'A' && digit <= 'F' ? digit - 'A' + 10 : -1;
}

/* Return the UTF-16 unit of four hexadecimal digits, -1 if there are none. */
static int32_t utf16_unit(const char *text, size_t length) {
    int32_t unit = 0;
    if (length < 4)
        return -1;
    for (size_t i = 0; i < 4; i++) {
        int digit = hex_digit(text[i]);
        if (digit < 0)
            return -1;
        unit = unit * 16 + digit;
    }
    return unit;
}

static bool is_high_surrogate(int32_t unit) { return unit >= 0xD800 && unit < 0xDC00; }

static bool is_low_surrogate(int32_t unit) { return unit >= 0xDC00 && unit < 0xE000; }

/* Read the code point of `\u` and a second escape if it is a surrogate; `text` begins after the `\u`. Returns the number
 * of bytes read, 0 if it is invalid. */
static size_t read_code_point(const char *text, size_t length, uint32_t *code_point) {
    int32_t unit = utf16_unit(text, length);
    if (unit < 0 || is_low_surrogate(unit))
        return 0;
    *code_point = (uint32_t)unit;
    if (!is_high_surrogate(unit))
        return 4;
    if (length < 10 || text[4] != '\\' || text[5] != 'u')
        return 0;
    int32_t low = utf16_unit(text + 6, length - 6);
    if (!is_low_surrogate(low))
        return 0;
    *code_point = 0x10000 + (((uint32_t)unit - 0xD800) << 10) + ((uint32_t)low - 0xDC00);
    return 10;
}

/* Return the length of the UTF-8 sequence at the beginning, 0 if it is invalid: overlong, a surrogate, or too large. */
static size_t utf8_sequence(const unsigned char *bytes, size_t length) {
    unsigned char first = bytes[0];
    if (first < 0x80)
        return 1;
    size_t n_bytes = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : 2;
    if (first < 0xC2 || first > 0xF4 || length < n_bytes)
        return 0;
    for (size_t i = 1; i < n_bytes; i++)
        if ((bytes[i] & 0xC0) != 0x80)
            return 0;
    if ((first == 0xE0 && bytes[1] < 0xA0) || (first == 0xED && bytes[1] >= 0xA0) ||
        (first == 0xF0 && bytes[1] < 0x90) || (first == 0xF4 && bytes[1] >= 0x90))
        return 0;
    return n_bytes;
}

bool utf8_valid(const char *text, size_t length) {
    for (size_t at = 0; at < length;) {
        size_t n_bytes = utf8_sequence((const unsigned char *)text + at, length - at);
        if (n_bytes == 0)
            return false;
        at += n_bytes;
    }
    return true;
}

void text_sanitize(char *text) {
    for (size_t length = strlen(text); *text != '\0';) {
        size_t n_bytes = utf8_sequence((const unsigned char *)text, length);
        if (n_bytes == 0 || (unsigned char)*text < 0x20 || *text == 0x7F) {
            *text = '?';
            n_bytes = 1;
        }
        text += n_bytes;
        length -= n_bytes;
    }
}

static bool read_escape(reader *in) {
    char kind = in->at < in->length ? in->text[in->at++] : '\0';
    uint32_t code_point;
    if (kind == 'u') {
        size_t n_read = read_code_point(in->text + in->at, in->length - in->at, &code_point);
        in->at += n_read;
        return n_read != 0 || fail(in, "an escape is invalid");
    }
    return (kind != '\0' && strchr("\"\\/bfnrt", kind) != NULL) || fail(in, "an escape is invalid");
}

static bool read_string(reader *in) {
    uint32_t index = add_value(in, JSON_STRING);
    if (index == JSON_NONE)
        return false;
    in->at++;
    while (in->at < in->length) {
        unsigned char byte = (unsigned char)in->text[in->at];
        if (byte == '"') {
            in->at++;
            end_value(in, index);
            return true;
        }
        if (byte == '\\') {
            in->at++;
            if (!read_escape(in))
                return false;
            continue;
        }
        if (byte < 0x20)
            return fail(in, "a string has a control character");
        size_t n_bytes = utf8_sequence((const unsigned char *)in->text + in->at, in->length - in->at);
        if (n_bytes == 0)
            return fail(in, "a string is not UTF-8");
        in->at += n_bytes;
    }
    return fail(in, "a string does not end");
}

static bool is_digit(const reader *in) {
    return in->at < in->length && in->text[in->at] >= '0' && in->text[in->at] <= '9';
}

static bool read_digits(reader *in) {
    if (!is_digit(in))
        return fail(in, "a number is invalid");
    while (is_digit(in))
        in->at++;
    return true;
}

static bool read_number(reader *in) {
    uint32_t index = add_value(in, JSON_NUMBER);
    if (index == JSON_NONE)
        return false;
    if (at_byte(in, '-'))
        in->at++;
    if (at_byte(in, '0'))
        in->at++;
    else if (!read_digits(in))
        return false;
    if (at_byte(in, '.')) {
        in->at++;
        if (!read_digits(in))
            return false;
    }
    if (at_byte(in, 'e') || at_byte(in, 'E')) {
        in->at++;
        if (at_byte(in, '+') || at_byte(in, '-'))
            in->at++;
        if (!read_digits(in))
            return false;
    }
    end_value(in, index);
    return true;
}

static bool read_word(reader *in, const char *word, json_kind kind) {
    size_t length = strlen(word);
    if (in->length - in->at < length || memcmp(in->text + in->at, word, length) != 0)
        return fail(in, "a value is invalid");
    uint32_t index = add_value(in, kind);
    if (index == JSON_NONE)
        return false;
    in->at += length;
    end_value(in, index);
    return true;
}

static bool read_value(reader *in, int depth);

static bool read_member(reader *in, int depth) {
    if (!at_byte(in, '"'))
        return fail(in, "a name is missing");
    if (!read_string(in))
        return false;
    skip_space(in);
    if (!at_byte(in, ':'))
        return fail(in, "a colon is missing");
    in->at++;
    return read_value(in, depth);
}

static bool read_container(reader *in, json_kind kind, int depth) {
    char end = kind == JSON_OBJECT ? '}' : ']';
    if (depth >= JSON_MAX_DEPTH)
        return fail(in, "it is nested too deeply");
    uint32_t index = add_value(in, kind);
    if (index == JSON_NONE)
        return false;
    in->at++;
    skip_space(in);
    if (!at_byte(in, end)) {
        for (;;) {
            skip_space(in);
            if (!(kind == JSON_OBJECT ? read_member(in, depth + 1) : read_value(in, depth + 1)))
                return false;
            skip_space(in);
            if (!at_byte(in, ','))
                break;
            in->at++;
        }
        if (!at_byte(in, end))
            return fail(in, "a comma or the end of a list or object is missing");
    }
    in->at++;
    end_value(in, index);
    return true;
}

static bool read_value(reader *in, int depth) {
    skip_space(in);
    switch (in->at < in->length ? in->text[in->at] : '\0') {
    case '{':
        return read_container(in, JSON_OBJECT, depth);
    case '[':
        return read_container(in, JSON_ARRAY, depth);
    case '"':
        return read_string(in);
    case 't':
        return read_word(in, "true", JSON_TRUE);
    case 'f':
        return read_word(in, "false", JSON_FALSE);
    case 'n':
        return read_word(in, "null", JSON_NULL);
    case '\0':
        return fail(in, "a value is missing");
    default:
        return read_number(in);
    }
}

bool json_parse(json_document *document, const char *text, size_t length, const char **why, size_t *at) {
    *document = (json_document){.text = text};
    reader in = {.document = document, .text = text, .length = length};
    bool valid = length < UINT32_MAX ? read_value(&in, 0) : fail(&in, "it is too long");
    if (valid) {
        skip_space(&in);
        if (in.at < length)
            valid = fail(&in, "text follows it");
    }
    if (!valid) {
        *why = in.why;
        *at = in.at;
        json_free(document);
    }
    return valid;
}

void json_free(json_document *document) {
    free(document->values);
    *document = (json_document){0};
}

uint32_t json_first(const json_document *document, uint32_t container) {
    uint32_t first = container + 1;
    return first < document->values[container].next ? first : JSON_NONE;
}

uint32_t json_after(const json_document *document, uint32_t container, uint32_t value) {
    uint32_t next = document->values[value].next;
    return next < document->values[container].next ? next : JSON_NONE;
}

uint32_t json_member(const json_document *document, uint32_t object, const char *name) {
    uint32_t found = JSON_NONE;
    if (document->values[object].kind != JSON_OBJECT)
        return JSON_NONE;
    for (uint32_t key = json_first(document, object); key != JSON_NONE;) {
        uint32_t value = document->values[key].next;
        if (json_equals(document, key, name))
            found = value;
        key = json_after(document, object, value);
    }
    return found;
}

static size_t encode_utf8(uint32_t code_point, char *out) {
    if (code_point < 0x80) {
        out[0] = (char)code_point;
        return 1;
    }
    if (code_point < 0x800) {
        out[0] = (char)(0xC0 | code_point >> 6);
        out[1] = (char)(0x80 | (code_point & 0x3F));
        return 2;
    }
    if (code_point < 0x10000) {
        out[0] = (char)(0xE0 | code_point >> 12);
        out[1] = (char)(0x80 | (code_point >> 6 & 0x3F));
        out[2] = (char)(0x80 | (code_point & 0x3F));
        return 3;
    }
    out[0] = (char)(0xF0 | code_point >> 18);
    out[1] = (char)(0x80 | (code_point >> 12 & 0x3F));
    out[2] = (char)(0x80 | (code_point >> 6 & 0x3F));
    out[3] = (char)(0x80 | (code_point & 0x3F));
    return 4;
}

static char unescaped(char kind) {
    switch (kind) {
    case 'b':
        return '\b';
    case 'f':
        return '\f';
    case 'n':
        return '\n';
    case 'r':
        return '\r';
    case 't':
        return '\t';
    default:
        return kind;
    }
}

char *json_string(const json_document *document, uint32_t value, size_t *length) {
    if (value == JSON_NONE || document->values[value].kind != JSON_STRING)
        return NULL;
    /* Without its quotes; no escape is shorter than its character. */
    size_t at = document->values[value].start + 1, end = document->values[value].end - 1;
    char *string = malloc(end - at + 1);
    if (string == NULL)
        return NULL;
    size_t n_bytes = 0;
    while (at < end) {
        char byte = document->text[at++];
        if (byte != '\\') {
            string[n_bytes++] = byte;
            continue;
        }
        char kind = document->text[at++];
        if (kind != 'u') {
            string[n_bytes++] = unescaped(kind);
            continue;
        }
        uint32_t code_point = 0;
        at += read_code_point(document->text + at, end - at, &code_point);
        n_bytes += encode_utf8(code_point, string + n_bytes);
    }
    string[n_bytes] = '\0';
    if (length != NULL)
        *length = n_bytes;
    return string;
}

bool json_equals(const json_document *document, uint32_t value, const char *text) {
    size_t length, n_text = strlen(text);
    if (value == JSON_NONE || document->values[value].kind != JSON_STRING)
        return false;
    const char *raw = document->text + document->values[value].start + 1;
    size_t n_raw = document->values[value].end - document->values[value].start - 2;
    if (memchr(raw, '\\', n_raw) == NULL)
        return n_raw == n_text && memcmp(raw, text, n_text) == 0;
    char *string = json_string(document, value, &length);
    bool equal = string != NULL && length == n_text && memcmp(string, text, length) == 0;
    free(string);
    return equal;
}

bool json_integer(const json_document *document, uint32_t value, int64_t *number) {
    if (value == JSON_NONE || document->values[value].kind != JSON_NUMBER)
        return false;
    const char *at = document->text + document->values[value].start;
    const char *end = document->text + document->values[value].end;
    bool negative = *at == '-';
    int64_t read = 0;
    for (at += negative; at < end; at++) {
        if (*at < '0' || *at > '9' || read > (INT64_MAX - 9) / 10)
            return false;
        read = read * 10 + (*at - '0');
    }
    *number = negative ? -read : read;
    return true;
}

static bool text_reserve(text_buffer *text, size_t length) {
    if (text->failed || length > text->limit - text->length) {
        text->failed = true;
        return false;
    }
    size_t needed = text->length + length + 1;
    if (needed <= text->capacity)
        return true;
    size_t capacity = text->capacity < 128 ? 256 : text->capacity * 2;
    if (capacity < needed)
        capacity = needed;
    char *data = realloc(text->data, capacity);
    if (data == NULL) {
        text->failed = true;
        return false;
    }
    text->data = data;
    text->capacity = capacity;
    return true;
}

void text_add(text_buffer *text, const char *bytes, size_t length) {
    if (!text_reserve(text, length))
        return;
    if (length > 0)
        memcpy(text->data + text->length, bytes, length);
    text->length += length;
    text->data[text->length] = '\0';
}

void text_add_string(text_buffer *text, const char *string) { text_add(text, string, strlen(string)); }

void text_add_json(text_buffer *text, const char *bytes, size_t length) {
    static const char digits[] = "0123456789abcdef";
    text_add(text, "\"", 1);
    for (size_t at = 0, begin = 0; at <= length; at++) {
        unsigned char byte = at < length ? (unsigned char)bytes[at] : '"';
        if (byte >= 0x20 && byte != '"' && byte != '\\')
            continue;
        text_add(text, bytes + begin, at - begin);
        begin = at + 1;
        if (at == length)
            break;
        if (byte == '"' || byte == '\\') {
            text_add(text, (char[]){'\\', (char)byte}, 2);
        } else {
            text_add(text, (char[]){'\\', 'u', '0', '0', digits[byte >> 4], digits[byte & 15]}, 6);
        }
    }
    text_add(text, "\"", 1);
}

void text_clear(text_buffer *text) {
    text->length = 0;
    text->failed = false;
    if (text->data != NULL)
        text->data[0] = '\0';
}

void text_free(text_buffer *text) {
    free(text->data);
    text->data = NULL;
    text->length = text->capacity = 0;
}
