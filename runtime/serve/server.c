/* SPDX-License-Identifier: Apache-2.0 */
#include "server.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "exchange.h"
#include "wyoming.h"

/* How long a connection may take, in seconds. */
static const double HEAD_S = 15, BODY_S = 30, IDLE_S = 75, WRITE_S = 30, LINGER_S = 2;
enum { READ_BYTES = 16384 };

double clock_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- connections ---- */

static void close_connection(server *s, uint32_t i) {
    connection *c = s->connections[i];
    exchange_drop(s, &c->exchange);
    close(c->fd);
    free(c->in.data);
    free(c->out.data);
    free(c);
    s->connections[i] = s->connections[--s->connection_count];
}

/* Find the connection that has waited longest for its next request; MOST_CONNECTIONS: none. */
static uint32_t idle_connection(const server *s) {
    uint32_t oldest = MOST_CONNECTIONS;
    for (uint32_t i = 0; i < s->connection_count; i++) {
        const connection *c = s->connections[i];
        if (c->busy || c->in.length > 0) continue;
        if (oldest == MOST_CONNECTIONS || c->deadline < s->connections[oldest]->deadline) oldest = i;
    }
    return oldest;
}

/* Tell whether there is a place for another connection; else it waits in the backlog. */
static bool has_place(const server *s) {
    return s->connection_count < s->most_connections || idle_connection(s) != MOST_CONNECTIONS;
}

static void accept_connection(server *s, uint32_t listener) {
    if (!has_place(s)) return;
    if (s->connection_count == s->most_connections) close_connection(s, idle_connection(s));
    int fd = accept4(s->listeners[listener], NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) return; /* it is gone already, or there are no descriptors left */
    int yes = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    connection *c = allocate(sizeof *c);
    *c = (connection){
        .fd = fd, .speaks_wyoming = listener == s->wyoming_listener, .deadline = clock_seconds() + HEAD_S};
    s->connections[s->connection_count++] = c;
}

/* ---- answers ---- */

static void append_head(const server *s, connection *c, int status, const char *type) {
    const http_request *r = &c->request;
    append_text(&c->out, "HTTP/1.1 %d %s\r\nContent-Type: %s\r\n", status, http_reason(status), type);
    if (s->settings->cors && r->origin.at) {
        append_text(&c->out,
                    "Access-Control-Allow-Origin: %s\r\nVary: Origin\r\nAccess-Control-Allow-Headers: Authorization, "
                    "Content-Type\r\nAccess-Control-Allow-Methods: GET, POST\r\n",
                    s->settings->cors);
    }
    if (c->policy) append_text(&c->out, "Content-Security-Policy: %s\r\nReferrer-Policy: no-referrer\r\n", c->policy);
    if (c->allow) append_text(&c->out, "Allow: %s\r\n", c->allow);
    if (status == 401) append_text(&c->out, "WWW-Authenticate: Bearer\r\n");
    if (status == 503) append_text(&c->out, "Retry-After: 5\r\n");
    append_text(&c->out, "X-Content-Type-Options: nosniff\r\nCache-Control: no-store\r\n%s",
                c->close_after ? "Connection: close\r\n" : "");
}

void respond(server *s, connection *c, int status, const char *type, const char *body, size_t length) {
    s->refused += status >= 400;
    if (c->speaks_wyoming) {
        append(&c->out, body, length);
        return;
    }
    append_head(s, c, status, type);
    append_text(&c->out, "Content-Length: %zu\r\n\r\n", length);
    if (c->request.method != HTTP_HEAD) append(&c->out, body, length);
}

void stream_begin(server *s, connection *c, const char *type) {
    c->chunked = c->request.is_1_1;
    if (!c->chunked) c->close_after = true;
    append_head(s, c, 200, type);
    append_text(&c->out, "%s\r\n", c->chunked ? "Transfer-Encoding: chunked\r\n" : "");
}

void stream_piece(connection *c, const char *data, size_t length) {
    if (length == 0) return;
    if (c->chunked) append_text(&c->out, "%zx\r\n", length);
    append(&c->out, data, length);
    if (c->chunked) append(&c->out, "\r\n", 2);
}

void stream_end(connection *c) {
    if (c->chunked) append(&c->out, "0\r\n\r\n", 5);
    c->chunked = false;
}

/* ---- requests ---- */

/* Refuse what is not a request; nothing after it can be understood. */
static void refuse_request(server *s, connection *c, int status, const char *why) {
    text_buffer body = {0};
    c->close_after = c->busy = true;
    append_text(&body, "{\"error\": {\"message\": \"%s\", \"type\": \"invalid_request_error\"}}\n", why);
    respond(s, c, status, "application/json", body.data, body.length);
    free(body.data);
}

/* Bytes of the bodies that connections hold or wait for. */
static size_t bodies(const server *s) {
    size_t sum = 0;
    for (uint32_t i = 0; i < s->connection_count; i++)
        if (s->connections[i]->has_head) sum += s->connections[i]->request.body_bytes;
    return sum;
}

/* Take the next request from what was read, if it is whole. */
static void take_request(server *s, connection *c) {
    const char *why = NULL;
    if (c->busy || c->in.length == 0) return;
    if (c->speaks_wyoming) {
        wyoming_take(s, c);
        return;
    }
    int status = http_read_head(c->in.data, c->in.length, BODY_BYTES, &c->request, &why);
    if (status == 0) return;
    if (status > 1) {
        s->requests++;
        refuse_request(s, c, status, why);
        return;
    }
    if (!c->has_head) {
        if (bodies(s) + c->request.body_bytes > ALL_BODIES_BYTES) {
            refuse_request(s, c, 503, "too many large requests at once");
            return;
        }
        c->has_head = true;
        c->deadline = clock_seconds() + BODY_S;
        if (c->request.expects_continue && c->request.body_bytes > 0)
            append_text(&c->out, "HTTP/1.1 100 Continue\r\n\r\n");
    }
    if (c->in.length < c->request.head_bytes + c->request.body_bytes) return;
    c->busy = true;
    c->close_after = !c->request.keep_alive;
    s->requests++;
    route(s, c);
}

/* After an answer was sent, make ready for the next request. */
static void next_request(connection *c) {
    size_t taken = c->request.head_bytes + c->request.body_bytes;
    c->in.length -= taken;
    memmove(c->in.data, c->in.data + taken, c->in.length);
    if (c->in.length == 0) { /* a large request does not stay in memory */
        free(c->in.data);
        free(c->out.data);
        c->in = c->out = (text_buffer){0};
    }
    c->sent = c->out.length = 0;
    c->busy = c->has_head = false;
    c->request = (http_request){0};
    c->policy = c->allow = NULL;
    c->deadline = clock_seconds() + (c->in.length > 0 ? HEAD_S : IDLE_S);
}

/* ---- reading and writing; false: the connection is over ---- */

static bool read_some(server *s, connection *c) {
    char bytes[READ_BYTES];
    ssize_t got = read(c->fd, bytes, sizeof bytes);
    if (got < 0) return errno == EAGAIN || errno == EINTR;
    if (got == 0) return false;
    if (c->lingers) return true;
    if (c->in.length == 0 && !c->has_head) c->deadline = clock_seconds() + HEAD_S;
    append(&c->in, bytes, (size_t)got);
    take_request(s, c);
    return true;
}

static bool write_some(connection *c) {
    while (c->sent < c->out.length) {
        ssize_t put = send(c->fd, c->out.data + c->sent, c->out.length - c->sent, MSG_NOSIGNAL);
        if (put < 0) return errno == EAGAIN || errno == EINTR;
        c->sent += (size_t)put;
        c->deadline = clock_seconds() + WRITE_S;
    }
    c->sent = c->out.length = 0;
    return true;
}

/* Move a connection on as far as it goes without waiting. */
static bool advance(server *s, connection *c) {
    for (;;) {
        if (c->busy && c->out.length == 0) c->deadline = clock_seconds() + WRITE_S;
        if (c->exchange && c->out.length - c->sent < UNSENT_BYTES) exchange_advance(s, c);
        if (!write_some(c)) return false;
        if (c->out.length > 0 || !c->busy || c->exchange) return true;
        if (c->close_after) {
            c->lingers = true;
            c->busy = false;
            c->deadline = clock_seconds() + LINGER_S;
            return !shutdown(c->fd, SHUT_WR);
        }
        next_request(c);
        take_request(s, c);
    }
}

static bool serve_connection(server *s, connection *c, short events, double now) {
    if (events & (POLLERR | POLLNVAL)) return false;
    if (c->busy && events & (POLLHUP | POLLRDHUP)) return false; /* whoever hangs up wants no answer */
    if (events & (POLLIN | POLLHUP) && !c->busy && !read_some(s, c)) return false;
    if (!advance(s, c)) return false;
    bool waits_for_us = c->exchange && c->out.length == 0;
    return waits_for_us || now < c->deadline;
}

/* ---- the loop ---- */

static short events_of(const connection *c) {
    short events = POLLRDHUP;
    if (!c->busy) events |= POLLIN;
    if (c->sent < c->out.length) events |= POLLOUT;
    return events;
}

/* Forget what the scheduler wrote; that it did was enough. */
static void drain(int fd) {
    char bytes[256];
    while (read(fd, bytes, sizeof bytes) > 0) {
    }
}

int server_run(server *s) {
    struct pollfd files[1 + MOST_LISTENERS + MOST_CONNECTIONS];
    for (;;) {
        uint32_t count = 0, connections = s->connection_count;
        files[count++] = (struct pollfd){.fd = s->wake[0], .events = POLLIN};
        for (uint32_t i = 0; i < s->listener_count; i++)
            files[count++] = (struct pollfd){.fd = s->listeners[i], .events = has_place(s) ? POLLIN : 0};
        uint32_t first = count;
        for (uint32_t i = 0; i < connections; i++)
            files[count++] = (struct pollfd){.fd = s->connections[i]->fd, .events = events_of(s->connections[i])};
        if (poll(files, count, 1000) < 0 && errno != EINTR)
            return fail(EXIT_IO, "cannot wait for connections: %s", strerror(errno));
        drain(s->wake[0]);
        double now = clock_seconds();
        for (uint32_t i = connections; i-- > 0;) /* closing moves the last one, which was served already, to i */
            if (!serve_connection(s, s->connections[i], files[first + i].revents, now)) close_connection(s, i);
        for (uint32_t i = 0; i < s->listener_count; i++)
            if (files[1 + i].revents & POLLIN) accept_connection(s, i);
    }
}
