/* SPDX-License-Identifier: Apache-2.0 */
#include "listen.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { FIRST_PASSED = 3, BACKLOG = 128 };

typedef union address {
    struct sockaddr any;
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;
    struct sockaddr_storage room;
} address;

static bool is_loopback(const address *a) {
    if (a->any.sa_family == AF_INET) return ntohl(a->v4.sin_addr.s_addr) >> 24 == 127;
    if (a->any.sa_family == AF_INET6) return IN6_IS_ADDR_LOOPBACK(&a->v6.sin6_addr);
    return a->any.sa_family == AF_UNIX; /* its file's permissions say who may connect */
}

/* Take a socket that listens already. */
static int add_listener(server *s, int fd) {
    address a = {0};
    socklen_t size = sizeof a;
    if (s->listener_count == MOST_LISTENERS) return fail(EXIT_USAGE, "more than %d sockets", MOST_LISTENERS);
    if (getsockname(fd, &a.any, &size) || fcntl(fd, F_SETFL, O_NONBLOCK) || fcntl(fd, F_SETFD, FD_CLOEXEC))
        return fail(EXIT_IO, "cannot use socket %d: %s", fd, strerror(errno));
    s->loopback_only &= is_loopback(&a);
    s->listeners[s->listener_count++] = fd;
    return EXIT_DONE;
}

/* Write the address of a host that is a number, or localhost. */
static bool parse_address(const char *host, uint16_t port, address *out, socklen_t *size) {
    *out = (address){0};
    if (!strcmp(host, "localhost")) host = "127.0.0.1";
    if (inet_pton(AF_INET, host, &out->v4.sin_addr) == 1) {
        out->v4.sin_family = AF_INET;
        out->v4.sin_port = htons(port);
        *size = sizeof out->v4;
        return true;
    }
    out->v6.sin6_family = AF_INET6;
    out->v6.sin6_port = htons(port);
    *size = sizeof out->v6;
    return inet_pton(AF_INET6, host, &out->v6.sin6_addr) == 1;
}

static int listen_at(server *s, const char *host, uint64_t port) {
    address a;
    socklen_t size;
    int yes = 1;
    if (!parse_address(host, (uint16_t)port, &a, &size))
        return fail(EXIT_USAGE, "--host '%s': expected an IP address or localhost", host);
    int fd = socket(a.any.sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes) || bind(fd, &a.any, size) ||
        listen(fd, BACKLOG))
        return fail(EXIT_IO, "cannot listen on %s port %u: %s", host, (unsigned)port, strerror(errno));
    return add_listener(s, fd);
}

/* Return the number of sockets that systemd passed to this process (sd_listen_fds(3)). */
static int passed_sockets(void) {
    const char *pid = getenv("LISTEN_PID"), *count = getenv("LISTEN_FDS");
    if (!pid || !count || strtol(pid, NULL, 10) != getpid()) return 0;
    long n = strtol(count, NULL, 10);
    return n > 0 && n <= MOST_LISTENERS ? (int)n : 0;
}

/* Listen for Wyoming at "HOST:PORT". It has no keys, so off this machine everybody may ask. */
static int listen_for_wyoming(server *s, const char *place) {
    const char *colon = strrchr(place, ':');
    char *end, host[INET6_ADDRSTRLEN];
    unsigned long port = colon ? strtoul(colon + 1, &end, 10) : 0;
    size_t length = colon ? (size_t)(colon - place) : 0;
    bool brackets = length > 2 && place[0] == '[' && place[length - 1] == ']';
    if (!colon || end == colon + 1 || *end || port > UINT16_MAX || length >= sizeof host)
        return fail(EXIT_USAGE, "--wyoming '%s': expected HOST:PORT", place);
    snprintf(host, sizeof host, "%.*s", (int)(brackets ? length - 2 : length), place + brackets);
    bool others_loopback = s->loopback_only;
    s->loopback_only = true;
    s->wyoming_listener = s->listener_count;
    int code = listen_at(s, host, port);
    if (!code && !s->loopback_only && !s->settings->allow_anyone)
        return fail(EXIT_USAGE,
                    "--wyoming %s: everybody on the network could use it, for it has no keys: give "
                    "--allow-anyone if that is meant",
                    place);
    s->loopback_only = others_loopback; /* what this tells is of HTTP */
    return code;
}

int open_listeners(server *s) {
    const settings *set = s->settings;
    int code = EXIT_DONE, passed = passed_sockets();
    s->wyoming_listener = MOST_LISTENERS;
    s->loopback_only = true;
    for (int i = 0; !code && i < passed; i++) code = add_listener(s, FIRST_PASSED + i);
    if (!code && passed == 0) code = listen_at(s, set->host, set->port);
    if (code) return code;
    if (!s->loopback_only && !s->api_key && !set->allow_anyone)
        return fail(EXIT_USAGE, "everybody on the network could use this server: give --api-key-file FILE, or "
                                "--allow-anyone if that is meant");
    return set->wyoming ? listen_for_wyoming(s, set->wyoming) : EXIT_DONE;
}

void announce_listeners(const server *s) {
    for (uint32_t i = 0; i < s->listener_count; i++) {
        address a = {0};
        socklen_t size = sizeof a;
        char host[INET6_ADDRSTRLEN] = "";
        const char *scheme = i == s->wyoming_listener ? "tcp" : "http";
        if (getsockname(s->listeners[i], &a.any, &size)) continue;
        if (a.any.sa_family == AF_INET) {
            inet_ntop(AF_INET, &a.v4.sin_addr, host, sizeof host);
            note("listening on %s://%s:%u", scheme, host, (unsigned)ntohs(a.v4.sin_port));
        } else if (a.any.sa_family == AF_INET6) {
            inet_ntop(AF_INET6, &a.v6.sin6_addr, host, sizeof host);
            note("listening on %s://[%s]:%u", scheme, host, (unsigned)ntohs(a.v6.sin6_port));
        } else {
            note("listening on a socket that was passed");
        }
    }
}
