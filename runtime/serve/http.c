/* SPDX-License-Identifier: Apache-2.0 */
#include "http.h"

#include <string.h>
#include <strings.h>

/* What is left to read of the head. */
typedef struct cursor {
    const char *at, *end;
} cursor;

bool http_is(http_text text, const char *word) {
    return text.at && strlen(word) == text.length && !memcmp(text.at, word, text.length);
}

bool http_is_name(http_text text, const char *word) {
    return text.at && strlen(word) == text.length && !strncasecmp(text.at, word, text.length);
}

const char *http_reason(int status) {
    static const struct {
        int status;
        const char *reason;
    } reasons[] = {{200, "OK"},
                   {204, "No Content"},
                   {400, "Bad Request"},
                   {401, "Unauthorized"},
                   {403, "Forbidden"},
                   {404, "Not Found"},
                   {405, "Method Not Allowed"},
                   {408, "Request Timeout"},
                   {411, "Length Required"},
                   {413, "Content Too Large"},
                   {414, "URI Too Long"},
                   {431, "Request Header Fields Too Large"},
                   {500, "Internal Server Error"},
                   {501, "Not Implemented"},
                   {503, "Service Unavailable"},
                   {505, "HTTP Version Not Supported"}};
    for (size_t i = 0; i < sizeof reasons / sizeof *reasons; i++)
        if (reasons[i].status == status) return reasons[i].reason;
    return "Error";
}

static bool is_digit(char c) {
    return c >= '0' && c <= '9';
}

/* Tell the characters of methods and field names. */
static bool is_token(char c) {
    return is_digit(c) || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c && strchr("!#$%&'*+-.^_`|~", c));
}

static bool is_printable(char c) {
    return c > ' ' && c < 0x7F;
}

static bool is_value(char c) {
    unsigned char byte = (unsigned char)c;
    return byte == '\t' || (byte >= ' ' && byte != 0x7F);
}

static bool is_blank(char c) {
    return c == ' ' || c == '\t';
}

/* Take the characters that `is` accepts. */
static http_text take(cursor *c, bool is(char)) {
    http_text text = {c->at, 0};
    while (c->at < c->end && is(*c->at)) c->at++;
    text.length = (size_t)(c->at - text.at);
    return text;
}

static bool take_word(cursor *c, const char *word) {
    size_t length = strlen(word);
    if ((size_t)(c->end - c->at) < length || memcmp(c->at, word, length)) return false;
    c->at += length;
    return true;
}

static int refuse(int status, const char *reason, const char **why) {
    *why = reason;
    return status;
}

static http_method method_of(http_text name) {
    static const char *const names[] = {
        [HTTP_GET] = "GET", [HTTP_HEAD] = "HEAD", [HTTP_POST] = "POST", [HTTP_OPTIONS] = "OPTIONS"};
    for (http_method m = 0; m < HTTP_OTHER; m++)
        if (http_is(name, names[m])) return m;
    return HTTP_OTHER;
}

/* Read "METHOD /path?query HTTP/1.x". */
static int read_request_line(cursor *c, http_request *out, const char **why) {
    http_text method = take(c, is_token);
    if (method.length == 0 || !take_word(c, " ")) return refuse(400, "the request line has no method", why);
    out->method = method_of(method);
    out->path = take(c, is_printable);
    if (out->path.length == 0 || out->path.at[0] != '/' || !take_word(c, " "))
        return refuse(400, "the request's target does not begin with '/'", why);
    const char *query = memchr(out->path.at, '?', out->path.length);
    if (query) out->path.length = (size_t)(query - out->path.at);
    if (!take_word(c, "HTTP/")) return refuse(400, "the request line has no version", why);
    if (take_word(c, "1.1\r\n")) out->is_1_1 = out->keep_alive = true;
    else if (!take_word(c, "1.0\r\n")) return refuse(505, "only HTTP/1.1 and 1.0 are spoken here", why);
    return 0;
}

static int read_length(http_text value, size_t most, size_t *out, const char **why) {
    size_t length = 0;
    bool too_large = false;
    if (value.length == 0) return refuse(400, "Content-Length is empty", why);
    for (size_t i = 0; i < value.length; i++) {
        if (!is_digit(value.at[i])) return refuse(400, "Content-Length is not a number", why);
        if (!too_large) length = 10 * length + (size_t)(value.at[i] - '0');
        too_large |= length > most;
    }
    if (too_large) return refuse(413, "the request's body is too large", why);
    *out = length;
    return 0;
}

/* Tell whether a list such as "keep-alive, Upgrade" has a word. */
static bool list_has(http_text list, const char *word) {
    const char *end = list.at + list.length;
    for (const char *at = list.at; at < end;) {
        const char *comma = memchr(at, ',', (size_t)(end - at));
        const char *last = comma ? comma : end, *next = comma ? comma + 1 : end;
        while (at < last && is_blank(*at)) at++;
        while (last > at && is_blank(last[-1])) last--;
        if (http_is_name((http_text){at, (size_t)(last - at)}, word)) return true;
        at = next;
    }
    return false;
}

/* What may be there only once. */
typedef struct seen {
    bool length, coding;
} seen;

static int read_field(http_text name, http_text value, size_t most, http_request *out, seen *s, const char **why) {
    if (http_is_name(name, "Content-Length")) {
        if (s->length) return refuse(400, "Content-Length is given twice", why);
        s->length = true;
        return read_length(value, most, &out->body_bytes, why);
    }
    if (http_is_name(name, "Host")) {
        if (out->host.at) return refuse(400, "Host is given twice", why);
        out->host = value;
    } else if (http_is_name(name, "Authorization")) {
        if (out->authorization.at) return refuse(400, "Authorization is given twice", why);
        out->authorization = value;
    } else if (http_is_name(name, "Origin")) {
        if (out->origin.at) return refuse(400, "Origin is given twice", why);
        out->origin = value;
    } else if (http_is_name(name, "Transfer-Encoding")) {
        s->coding = true;
    } else if (http_is_name(name, "Expect")) {
        out->expects_continue = http_is_name(value, "100-continue");
    } else if (http_is_name(name, "Connection")) {
        if (list_has(value, "close")) out->keep_alive = false;
    }
    return 0;
}

static int read_fields(cursor *c, size_t most, http_request *out, const char **why) {
    seen s = {0};
    for (size_t count = 0; !take_word(c, "\r\n"); count++) {
        if (count == HTTP_FIELDS) return refuse(431, "the request has too many header fields", why);
        http_text name = take(c, is_token);
        if (name.length == 0 || !take_word(c, ":")) return refuse(400, "a header field has no name", why);
        take(c, is_blank);
        http_text value = take(c, is_value);
        while (value.length > 0 && is_blank(value.at[value.length - 1])) value.length--;
        if (!take_word(c, "\r\n")) return refuse(400, "a header field holds a control character", why);
        int status = read_field(name, value, most, out, &s, why);
        if (status) return status;
    }
    if (s.coding && s.length) return refuse(400, "both Content-Length and Transfer-Encoding are given", why);
    if (s.coding) return refuse(411, "send the body with Content-Length, not in chunks", why);
    return 0;
}

int http_read_head(const char *data, size_t length, size_t most, http_request *out, const char **why) {
    *out = (http_request){0};
    size_t searched = length < HTTP_HEAD_BYTES ? length : HTTP_HEAD_BYTES;
    const char *end = memmem(data, searched, "\r\n\r\n", 4);
    if (!end && searched < HTTP_HEAD_BYTES) return 0;
    if (!end) {
        bool long_line = !memchr(data, '\n', searched);
        return long_line ? refuse(414, "the request line is too long", why)
                         : refuse(431, "the request's head is too long", why);
    }
    cursor c = {data, end + 4};
    int status = read_request_line(&c, out, why);
    if (!status) status = read_fields(&c, most, out, why);
    if (status) return status;
    if (!out->host.at && out->is_1_1) return refuse(400, "the request names no Host", why);
    out->head_bytes = (size_t)(c.at - data);
    return 1;
}
