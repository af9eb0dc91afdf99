/* SPDX-License-Identifier: Apache-2.0 */
/* Mutated requests for the HTTP parser: http [SECONDS]. What it says of a request holds for every longer one that begins
 * so, what it lends lies within the head, and a head is never read before it is whole. */
#include <assert.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "../../runtime/serve/http.h"

enum { MOST = 40000, BODY = 1 << 20, ROUNDS_A_LOOK = 1000 };

static const char *const seeds[] = {
    "GET /health HTTP/1.1\r\nHost: localhost:8080\r\n\r\n",
    "POST /v1/chat/completions?a=b HTTP/1.1\r\nHost: [::1]:80\r\nContent-Length: 17\r\nExpect: "
    "100-continue\r\n\r\n{\"a\": [1, 2, 3]}",
    "HEAD / HTTP/1.0\r\nConnection: keep-alive, close\r\nAuthorization: Bearer x\r\nOrigin: http://a.example\r\n\r\n",
    "OPTIONS /x HTTP/1.1\r\nhost:\tlocalhost\t\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
};
static const char *const pieces[] = {
    "\r\n",     "\r\n\r\n", "\n", "\r", ":",     " ", "\t", "Host: a\r\n", "Content-Length: ", "99999999999999999999",
    "HTTP/1.1", "\x80",     "?",  ",",  "close", "/"};

static uint64_t state = 1;

static size_t draw(size_t below) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (size_t)(state >> 33) % below;
}

static void insert(char *data, size_t *length, size_t at, const char *piece, size_t size) {
    if (*length + size > MOST) return;
    memmove(data + at + size, data + at, *length - at);
    memcpy(data + at, piece, size);
    *length += size;
}

static void mutate(char *data, size_t *length) {
    size_t at = draw(*length + 1);
    const char *piece = pieces[draw(sizeof pieces / sizeof *pieces)];
    char byte = (char)draw(256);
    switch (draw(6)) {
    case 0: insert(data, length, at, piece, strlen(piece)); break;
    case 1: insert(data, length, at, &byte, 1); break;
    case 2:
        if (at < *length) data[at] = byte;
        break;
    case 3: *length = at; break;
    case 4:
        if (at < *length) memmove(data + at, data + at + 1, --*length - at);
        break;
    default:
        for (size_t n = draw(3000); n > 0; n--) insert(data, length, *length, piece, strlen(piece));
    }
}

static void check_text(http_text text, const char *data, size_t head) {
    if (text.at) assert(text.at >= data && text.at + text.length <= data + head);
}

/* Parse a copy that ends where its memory does. */
static int parse(const char *data, size_t length, http_request *out) {
    const char *why = NULL;
    char *copy = malloc(length + (length == 0));
    memcpy(copy, data, length);
    int status = http_read_head(copy, length, BODY, out, &why);
    assert(status >= 0 && (status <= 1 || (status >= 400 && status <= 505 && why)));
    if (status == 1) {
        assert(out->head_bytes <= length && out->head_bytes <= HTTP_HEAD_BYTES && out->body_bytes <= BODY);
        assert(out->path.length > 0 && out->path.at[0] == '/');
        check_text(out->path, copy, out->head_bytes);
        check_text(out->host, copy, out->head_bytes);
        check_text(out->origin, copy, out->head_bytes);
        check_text(out->authorization, copy, out->head_bytes);
    }
    free(copy);
    return status;
}

static void look(const char *data, size_t length) {
    http_request whole, cut;
    int status = parse(data, length, &whole);
    size_t shorter = draw(length + 1);
    int before = parse(data, shorter, &cut);
    if (before == 1) assert(status == 1 && cut.head_bytes == whole.head_bytes && cut.body_bytes == whole.body_bytes);
    else if (before > 1) assert(status == before);
    if (status == 1) assert((shorter >= whole.head_bytes) == (before == 1));
}

int main(int argc, char **argv) {
    static char data[MOST + 1];
    clock_t end = clock() + (clock_t)(argc > 1 ? atof(argv[1]) * CLOCKS_PER_SEC : CLOCKS_PER_SEC);
    unsigned long rounds = 0;
    for (; rounds % ROUNDS_A_LOOK || clock() < end; rounds++) {
        const char *seed = seeds[draw(sizeof seeds / sizeof *seeds)];
        size_t length = strlen(seed);
        memcpy(data, seed, length);
        for (size_t n = 1 + draw(6); n > 0; n--) mutate(data, &length);
        look(data, length);
    }
    printf("requests %lu\n", rounds);
    return 0;
}
