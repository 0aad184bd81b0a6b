/* A WebSocket client (RFC 6455) on a Unix socket: text messages, without extensions. */
#ifndef NN_WEBSOCKET_H
#define NN_WEBSOCKET_H

#include "json.h"

#define WEBSOCKET_MAX_MESSAGE (16 * 1024 * 1024)

typedef struct {
    int fd; /* -1 when closed */
    text_buffer message; /* the last one received */
    bool in_message; /* between the fragments of a message */
    bool drops_message; /* which began between calls */
    int wake; /* while bytes are awaited, `on_wake` is called when it is readable; -1 for none */
    bool (*on_wake)(void *user); /* false ends the wait, as an error */
    void *user;
    char why[160]; /* why the last operation failed */
    size_t begin, end; /* what was received and not yet read */
    unsigned char buffer[16 * 1024];
} websocket;

/* Connect to the socket at `path`. */
bool websocket_open(websocket *socket, const char *path);

/* Use a connected descriptor after the handshake. */
void websocket_init(websocket *socket, int fd);

/* Send a text message. */
bool websocket_send(websocket *socket, const char *text, size_t length);

/* Wait for the next text message, and answer pings meanwhile. False when the connection is over: the peer closed it,
 * broke the protocol, or does not answer. */
bool websocket_receive(websocket *socket);

/* Answer pings that have arrived, and drop messages. Waits at most for the end of a frame. False as for
 * `websocket_receive`. */
bool websocket_service(websocket *socket);

/* Send a close frame if the connection is open, and release everything. */
void websocket_close(websocket *socket);

#endif
