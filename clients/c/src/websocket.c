#define _GNU_SOURCE
#include "websocket.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#define IDLE_MS 30000 /* without a byte, then the peer is pinged; as long again, and it is given up */
#define OPEN_S 30
#define MAX_HEAD 4096
#define MAX_CONTROL 125
#define CLOSE_PROTOCOL 1002
#define CLOSE_TOO_LARGE 1009

enum { CONTINUATION = 0x0, TEXT = 0x1, BINARY = 0x2, CLOSE = 0x8, PING = 0x9, PONG = 0xA };

static bool fail(websocket *socket, const char *why) {
    snprintf(socket->why, sizeof socket->why, "%s", why);
    return false;
}

static bool fail_errno(websocket *socket, const char *what) {
    snprintf(socket->why, sizeof socket->why, "%s: %s", what, strerror(errno));
    return false;
}

static bool send_all(websocket *socket, const void *bytes, size_t length) {
    const char *at = bytes;
    while (length > 0) {
        ssize_t n_sent = send(socket->fd, at, length, MSG_NOSIGNAL);
        if (n_sent < 0 && errno == EINTR)
            continue;
        if (n_sent < 0)
            return fail_errno(socket, "the connection is lost");
        at += n_sent;
        length -= (size_t)n_sent;
    }
    return true;
}

/* Send a frame; frames of clients are masked with random bytes. */
static bool send_frame(websocket *socket, int opcode, const char *payload, size_t length) {
    unsigned char head[14] = {(unsigned char)(0x80 | opcode)};
    size_t n_head = 2, n_length = length < 126 ? 0 : length < 65536 ? 2 : 8;
    head[1] = (unsigned char)(0x80 | (n_length == 0 ? length : n_length == 2 ? 126 : 127));
    for (size_t i = n_length; i > 0; i--)
        head[n_head++] = (unsigned char)(length >> 8 * (i - 1));
    unsigned char *mask = head + n_head;
    if (getrandom(mask, 4, 0) != 4)
        return fail_errno(socket, "no random bytes");
    n_head += 4;
    if (!send_all(socket, head, n_head))
        return false;
    unsigned char piece[4096];
    for (size_t at = 0; at < length;) {
        size_t n_piece = length - at < sizeof piece ? length - at : sizeof piece;
        for (size_t i = 0; i < n_piece; i++)
            piece[i] = (unsigned char)payload[at + i] ^ mask[(at + i) % 4];
        if (!send_all(socket, piece, n_piece))
            return false;
        at += n_piece;
    }
    return true;
}

static bool send_close(websocket *socket, int code) {
    char payload[2] = {(char)(code >> 8), (char)code};
    return send_frame(socket, CLOSE, payload, sizeof payload);
}

static bool violation(websocket *socket, const char *why) {
    send_close(socket, CLOSE_PROTOCOL);
    return fail(socket, why);
}

/* Receive some bytes into the empty buffer. Pings are sent only after the handshake. */
static bool fill(websocket *socket, bool may_ping) {
    bool pinged = false;
    for (;;) {
        struct pollfd waiting[] = {{.fd = socket->fd, .events = POLLIN}, {.fd = socket->wake, .events = POLLIN}};
        int n_ready = poll(waiting, 2, IDLE_MS); /* ignores a negative descriptor */
        if (n_ready < 0 && errno != EINTR)
            return fail_errno(socket, "the connection is lost");
        if (n_ready == 0) {
            if (pinged || !may_ping)
                return fail(socket, "the daemon does not answer");
            pinged = true;
            if (!send_frame(socket, PING, NULL, 0))
                return false;
        }
        if (n_ready <= 0)
            continue;
        if (waiting[1].revents != 0 && !socket->on_wake(socket->user))
            return false;
        if (waiting[0].revents == 0)
            continue;
        ssize_t n_received = recv(socket->fd, socket->buffer, sizeof socket->buffer, 0);
        if (n_received < 0 && errno == EINTR)
            continue;
        if (n_received < 0)
            return fail_errno(socket, "the connection is lost");
        if (n_received == 0)
            return fail(socket, "the daemon has closed the connection");
        socket->begin = 0;
        socket->end = (size_t)n_received;
        return true;
    }
}

static bool receive_bytes(websocket *socket, void *bytes, size_t length) {
    unsigned char *to = bytes;
    while (length > 0) {
        if (socket->begin == socket->end && !fill(socket, true))
            return false;
        size_t n_bytes = socket->end - socket->begin < length ? socket->end - socket->begin : length;
        memcpy(to, socket->buffer + socket->begin, n_bytes);
        socket->begin += n_bytes;
        to += n_bytes;
        length -= n_bytes;
    }
    return true;
}

typedef struct {
    bool last;
    int opcode;
    uint64_t length;
} frame_head;

static bool receive_head(websocket *socket, frame_head *head) {
    unsigned char bytes[8];
    if (!receive_bytes(socket, bytes, 2))
        return false;
    head->last = bytes[0] & 0x80;
    head->opcode = bytes[0] & 0x0F;
    head->length = bytes[1] & 0x7F;
    bool is_control = head->opcode & 0x8;
    if (bytes[0] & 0x70)
        return violation(socket, "a frame has an unknown extension");
    if (bytes[1] & 0x80)
        return violation(socket, "a frame of the daemon is masked");
    if (is_control && (!head->last || head->length > MAX_CONTROL))
        return violation(socket, "a control frame is invalid");
    if (head->length >= 126) {
        size_t n_bytes = head->length == 126 ? 2 : 8;
        if (!receive_bytes(socket, bytes, n_bytes))
            return false;
        head->length = 0;
        for (size_t i = 0; i < n_bytes; i++)
            head->length = head->length << 8 | bytes[i];
    }
    return true;
}

static bool closed_by_peer(websocket *socket, const unsigned char *payload, size_t length) {
    int code = length >= 2 ? payload[0] << 8 | payload[1] : 0;
    int n_reason = length > 2 ? (int)length - 2 : 0;
    const char *reason = length > 2 ? (const char *)payload + 2 : "";
    send_close(socket, code != 0 ? code : 1000);
    snprintf(socket->why, sizeof socket->why, "the daemon has closed the connection: %d %.*s", code, n_reason, reason);
    return false;
}

static bool receive_control(websocket *socket, const frame_head *head) {
    unsigned char payload[MAX_CONTROL];
    size_t length = (size_t)head->length;
    if (!receive_bytes(socket, payload, length))
        return false;
    switch (head->opcode) {
    case PING:
        return send_frame(socket, PONG, (const char *)payload, length);
    case PONG:
        return true;
    case CLOSE:
        return closed_by_peer(socket, payload, length);
    default:
        return violation(socket, "a frame has an unknown opcode");
    }
}

static bool receive_payload(websocket *socket, uint64_t length) {
    if (length > socket->message.limit - socket->message.length) {
        send_close(socket, CLOSE_TOO_LARGE);
        return fail(socket, "a message is too large");
    }
    while (length > 0) {
        if (socket->begin == socket->end && !fill(socket, true))
            return false;
        size_t n_bytes = socket->end - socket->begin;
        if (n_bytes > length)
            n_bytes = (size_t)length;
        text_add(&socket->message, (const char *)socket->buffer + socket->begin, n_bytes);
        socket->begin += n_bytes;
        length -= n_bytes;
    }
    return !socket->message.failed || fail(socket, "memory is used up");
}

/* Receive a frame: handle a control frame, or add a data frame to the message. `ended` is set at a message's end. */
static bool receive_frame(websocket *socket, bool *ended) {
    frame_head head;
    *ended = false;
    if (socket->fd < 0 || !receive_head(socket, &head))
        return false;
    if (head.opcode & 0x8)
        return receive_control(socket, &head);
    if (head.opcode >= BINARY)
        return violation(socket, "a frame is not text");
    if (socket->in_message != (head.opcode == CONTINUATION))
        return violation(socket, "a message is fragmented wrongly");
    if (!socket->in_message)
        text_clear(&socket->message);
    socket->in_message = !head.last;
    *ended = head.last;
    return receive_payload(socket, head.length);
}

bool websocket_receive(websocket *socket) {
    bool ended;
    do {
        if (!receive_frame(socket, &ended))
            return false;
        if (ended && socket->drops_message)
            socket->drops_message = ended = false;
    } while (!ended);
    return true;
}

bool websocket_service(websocket *socket) {
    for (;;) {
        struct pollfd waiting = {.fd = socket->fd, .events = POLLIN};
        bool ended;
        if (socket->begin == socket->end && poll(&waiting, 1, 0) <= 0)
            break;
        if (!receive_frame(socket, &ended))
            return false;
    }
    socket->drops_message = socket->in_message;
    return true;
}

/* SHA-1 (FIPS 180-4), which proves that the peer has read the handshake. */
static uint32_t rotate(uint32_t word, int n_bits) { return word << n_bits | word >> (32 - n_bits); }

static void sha1_block(uint32_t state[5], const unsigned char block[64]) {
    uint32_t words[80];
    for (int i = 0; i < 16; i++)
        words[i] = (uint32_t)block[4 * i] << 24 | (uint32_t)block[4 * i + 1] << 16 | (uint32_t)block[4 * i + 2] << 8 |
                   block[4 * i + 3];
    for (int i = 16; i < 80; i++)
        words[i] = rotate(words[i - 3] ^ words[i - 8] ^ words[i - 14] ^ words[i - 16], 1);
    uint32_t a = state[0], b = state[1], c = state[2], d = state[3], e = state[4];
    for (int i = 0; i < 80; i++) {
        uint32_t mixed = i < 20   ? ((b & c) | (~b & d)) + 0x5A827999
                         : i < 40 ? (b ^ c ^ d) + 0x6ED9EBA1
                         : i < 60 ? ((b & c) | (b & d) | (c & d)) + 0x8F1BBCDC
                                  : (b ^ c ^ d) + 0xCA62C1D6;
        uint32_t next = rotate(a, 5) + mixed + e + words[i];
        e = d;
        d = c;
        c = rotate(b, 30);
        b = a;
        a = next;
    }
    state[0] += a;
    state[1] += b;
    state[2] += c;
    state[3] += d;
    state[4] += e;
}

/* Hash a text of at most 119 bytes. */
static void sha1(const char *text, size_t length, unsigned char digest[20]) {
    uint32_t state[5] = {0x67452301, 0xEFCDAB89, 0x98BADCFE, 0x10325476, 0xC3D2E1F0};
    unsigned char padded[128] = {0};
    size_t n_bytes = length < 56 ? 64 : 128;
    memcpy(padded, text, length);
    padded[length] = 0x80;
    for (size_t i = 0; i < 8; i++)
        padded[n_bytes - 1 - i] = (unsigned char)((uint64_t)length * 8 >> 8 * i);
    for (size_t at = 0; at < n_bytes; at += 64)
        sha1_block(state, padded + at);
    for (size_t i = 0; i < 20; i++)
        digest[i] = (unsigned char)(state[i / 4] >> (24 - 8 * (i % 4)));
}

static void base64(const unsigned char *bytes, size_t length, char *text) {
    static const char letters[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    for (size_t at = 0; at < length; at += 3) {
        size_t n_bytes = length - at < 3 ? length - at : 3;
        uint32_t group = 0;
        for (size_t i = 0; i < 3; i++)
            group = group << 8 | (i < n_bytes ? bytes[at + i] : 0);
        for (size_t i = 0; i < 4; i++)
            *text++ = i <= n_bytes ? letters[group >> (18 - 6 * i) & 63] : '=';
    }
    *text = '\0';
}

/* Whether a head has a header with this value; `head` begins with the status line. */
static bool has_header(const char *head, const char *name, const char *value) {
    size_t n_name = strlen(name), n_value = strlen(value);
    for (const char *line = strstr(head, "\r\n"); line != NULL; line = strstr(line, "\r\n")) {
        line += 2;
        if (strncasecmp(line, name, n_name) != 0 || line[n_name] != ':')
            continue;
        const char *given = line + n_name + 1;
        given += strspn(given, " \t");
        const char *end = given + n_value;
        if (strncmp(given, value, n_value) == 0)
            return strncmp(end + strspn(end, " \t"), "\r\n", 2) == 0;
    }
    return false;
}

static bool receive_response(websocket *socket, char *head) {
    size_t length = 0;
    while (length < MAX_HEAD - 1) {
        if (socket->begin == socket->end && !fill(socket, false))
            return false;
        head[length++] = (char)socket->buffer[socket->begin++];
        head[length] = '\0';
        if (length >= 4 && memcmp(head + length - 4, "\r\n\r\n", 4) == 0)
            return true;
    }
    return fail(socket, "the server there does not speak HTTP");
}

static bool handshake(websocket *socket) {
    static const char format[] = "GET /ws HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                                 "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Protocol: inferencecenter.v1\r\n"
                                 "Sec-WebSocket-Key: %s\r\n\r\n";
    unsigned char nonce[16], digest[20];
    char key[25], proof[64], expected[29], head[MAX_HEAD];
    if (getrandom(nonce, sizeof nonce, 0) != sizeof nonce)
        return fail_errno(socket, "no random bytes");
    base64(nonce, sizeof nonce, key);
    int n_bytes = snprintf(head, sizeof head, format, key);
    if (!send_all(socket, head, (size_t)n_bytes) || !receive_response(socket, head))
        return false;
    if (strncmp(head, "HTTP/1.1 101 ", 13) != 0) {
        size_t n_status = strcspn(head, "\r");
        snprintf(socket->why, sizeof socket->why, "the daemon refuses: %.*s", n_status < 80 ? (int)n_status : 80, head);
        return false;
    }
    n_bytes = snprintf(proof, sizeof proof, "%s258EAFA5-E914-47DA-95CA-C5AB0DC85B11", key);
    sha1(proof, (size_t)n_bytes, digest);
    base64(digest, sizeof digest, expected);
    return has_header(head, "Sec-WebSocket-Accept", expected) || fail(socket, "the server there is no WebSocket server");
}

void websocket_init(websocket *socket, int fd) {
    memset(socket, 0, sizeof *socket);
    socket->fd = fd;
    socket->wake = -1;
    socket->message.limit = WEBSOCKET_MAX_MESSAGE;
}

bool websocket_open(websocket *opened, const char *path) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct timeval limit = {.tv_sec = OPEN_S};
    websocket_init(opened, -1);
    if (strlen(path) >= sizeof address.sun_path)
        return fail(opened, "the path of the socket is longer than 107 bytes");
    strcpy(address.sun_path, path);
    opened->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (opened->fd < 0)
        return fail_errno(opened, "no socket");
    setsockopt(opened->fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
    int failed;
    do /* the backlog may be full, and a signal arrive meanwhile */
        failed = connect(opened->fd, (struct sockaddr *)&address, sizeof address);
    while (failed && errno == EINTR);
    if (failed)
        fail_errno(opened, "it cannot be connected to");
    else if (handshake(opened))
        return true;
    close(opened->fd);
    opened->fd = -1;
    return false;
}

bool websocket_send(websocket *socket, const char *text, size_t length) {
    return socket->fd >= 0 && send_frame(socket, TEXT, text, length);
}

void websocket_close(websocket *socket) {
    if (socket->fd >= 0) {
        send_close(socket, 1000);
        close(socket->fd);
        socket->fd = -1;
    }
    text_free(&socket->message);
}
