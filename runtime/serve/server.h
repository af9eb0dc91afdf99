/* SPDX-License-Identifier: Apache-2.0 */
/* `mxdraft serve`: one thread for all connections, one for the engine.
 *
 *   server.c      start here: sockets, the poll loop, limits and time-outs of connections
 *   http.c        the head of a request
 *   routes.c      which function answers which path; who may ask
 *   exchange.c    an answer that is being generated, and how it gets to its connection piece by piece
 *   request.c     what a request's JSON asks for: messages, sampling
 *   openai.c, ollama.c   how each API is asked, and how it words an answer; put.h, logprobs.c
 *   responses.c   OpenAI's other API for the same: an answer as a list of items
 *   wyoming.c     the same for voice assistants, without HTTP
 *   lists.c       health, properties, metrics; page.c, page.html: the page for people
 *   listen.c      sockets of its own, or passed by systemd
 *   scheduler.c   the engine's thread; prefixes.c its prompt cache
 */
#ifndef MXDRAFT_SERVE_SERVER_H
#define MXDRAFT_SERVE_SERVER_H

#include "../cli/cli.h"
#include "http.h"
#include "scheduler.h"

enum {
    MOST_CONNECTIONS = 128,
    MOST_LISTENERS = 8,
    BODY_BYTES = 1 << 20,
    ALL_BODIES_BYTES = 8 << 20, /* of all connections */
    UNSENT_BYTES = 65536        /* with more to send, a connection takes no more of its answer */
};

typedef struct exchange exchange;

typedef struct connection {
    int fd;
    bool busy;           /* a request is being answered: nothing more is read */
    bool speaks_wyoming; /* events in place of HTTP: an answer is its body alone */
    bool chunked, close_after;
    bool
        lingers; /* the answer is sent; what the client still sends is read and forgotten, so that it sees the answer */
    text_buffer in, out;
    size_t sent;          /* of out */
    double deadline;      /* by when there must be progress; it closes then */
    http_request request; /* while busy; its texts are in `in` */
    bool has_head;
    const char *policy; /* Content-Security-Policy of the answer; NULL: none */
    const char *allow;  /* methods that a path takes, where it takes others than the request's; NULL: nothing to say */
    exchange *exchange; /* NULL: none */
} connection;

typedef struct server {
    const settings *settings;
    const session *run;
    scheduler *scheduler;
    const mxd_plan *plan;
    mxd_model_info info;
    char *model_name;   /* of the bundle's file, without .mxb */
    char *api_key;      /* NULL: none */
    int64_t model_time; /* when the file was changed last, in seconds since 1970 */
    uint32_t parallel;  /* answers at once */
    bool loopback_only; /* all listeners are on this machine's own addresses */
    double started;
    uint64_t requests, refused; /* since the start */
    int listeners[MOST_LISTENERS];
    uint32_t listener_count;
    uint32_t wyoming_listener; /* which of them speaks Wyoming; MOST_LISTENERS: none */
    int wake[2];               /* the scheduler writes, poll() waits */
    connection *connections[MOST_CONNECTIONS];
    uint32_t connection_count, most_connections;
} server;

/* ---- server.c ---- */

/* Answer until the process ends; return only after a fault. */
int server_run(server *s);
/* Answer a request as a whole. */
void respond(server *s, connection *c, int status, const char *type, const char *body, size_t length);
/* Begin an answer in pieces, send one, end it. */
void stream_begin(server *s, connection *c, const char *type);
void stream_piece(connection *c, const char *data, size_t length);
void stream_end(connection *c);
double clock_seconds(void);

/* ---- routes.c ---- */

/* Answer the request at c->request, or begin to. The body has body_bytes at in.data + head_bytes. */
void route(server *s, connection *c);

#endif
