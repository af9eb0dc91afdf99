/* SPDX-License-Identifier: Apache-2.0 */
/* The head of an HTTP/1.1 request (RFC 9112), read strictly: what two readers could take in two ways is refused. */
#ifndef MXDRAFT_SERVE_HTTP_H
#define MXDRAFT_SERVE_HTTP_H

#include <stdbool.h>
#include <stddef.h>

enum { HTTP_HEAD_BYTES = 16384, HTTP_FIELDS = 64 };

/* Bytes of the request, not NUL-terminated; at NULL: not there. */
typedef struct http_text {
    const char *at;
    size_t length;
} http_text;

typedef enum http_method { HTTP_GET, HTTP_HEAD, HTTP_POST, HTTP_OPTIONS, HTTP_OTHER } http_method;

typedef struct http_request {
    http_method method;
    http_text path; /* without what follows '?' */
    http_text host, origin, authorization;
    bool is_1_1, keep_alive;
    bool expects_continue; /* the client waits for "100 Continue" before it sends the body */
    size_t head_bytes, body_bytes;
} http_request;

/* Read a request's head from data[length] into *out, whose texts point into data. Return 0 if it is not whole yet, 1 if
 * it is, else the status that refuses it (400, 411, 413, 414, 431, 501, 505), with *why set. A body of more than
 * `most` bytes is refused. */
int http_read_head(const char *data, size_t length, size_t most, http_request *out, const char **why);

/* Return whether a text is `word`; http_is_name() takes upper and lower case as equal. */
bool http_is(http_text text, const char *word);
bool http_is_name(http_text text, const char *word);
/* Return the reason phrase of a status. */
const char *http_reason(int status);

#endif
