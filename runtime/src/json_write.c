/* SPDX-License-Identifier: Apache-2.0 */
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "json.h"
#include "utf8.h"

void mxd_json_writer_init(mxd_json_writer *w, size_t limit) {
    *w = (mxd_json_writer){.limit = limit};
}

void mxd_json_writer_free(mxd_json_writer *w) {
    free(w->data);
    *w = (mxd_json_writer){.limit = w->limit};
}

/* Make room for n more bytes; false, and the writer has failed, if there is none. */
static bool make_room(mxd_json_writer *w, size_t n) {
    if (w->failed || n > w->limit - w->len) {
        w->failed = true;
        return false;
    }
    if (n <= w->cap - w->len) return true;
    size_t cap = w->cap < 128 ? 256 : 2 * w->cap;
    if (cap < w->len + n) cap = w->len + n;
    if (cap > w->limit) cap = w->limit;
    char *data = realloc(w->data, cap);
    w->failed = !data;
    if (!data) return false;
    w->data = data;
    w->cap = cap;
    return true;
}

void mxd_json_append(mxd_json_writer *w, const char *text, size_t len) {
    if (len == 0 || !make_room(w, len)) return;
    memcpy(w->data + w->len, text, len);
    w->len += len;
}

/* Put the comma that a value or name needs before it. */
static void separate(mxd_json_writer *w) {
    if (w->comma) mxd_json_append(w, ",", 1);
    w->comma = true;
}

void mxd_json_put_raw(mxd_json_writer *w, const char *text, size_t len) {
    separate(w);
    mxd_json_append(w, text, len);
}

void mxd_json_open(mxd_json_writer *w, char bracket) {
    mxd_json_put_raw(w, &bracket, 1);
    w->comma = false;
}

void mxd_json_close(mxd_json_writer *w, char bracket) {
    mxd_json_append(w, &bracket, 1);
    w->comma = true;
}

void mxd_json_name(mxd_json_writer *w, const char *name) {
    mxd_json_put_text(w, name);
    mxd_json_append(w, ":", 1);
    w->comma = false;
}

static void put_escape(mxd_json_writer *w, uint8_t c) {
    static const char from[] = "\"\\\b\f\n\r\t", to[] = "\"\\bfnrt";
    const char *found = c ? strchr(from, c) : NULL;
    char escape[8] = {'\\', found ? to[found - from] : 'u'};
    if (!found) snprintf(escape + 2, sizeof escape - 2, "%04x", c);
    mxd_json_append(w, escape, strlen(escape));
}

void mxd_json_put_string(mxd_json_writer *w, const char *text, size_t len) {
    const uint8_t *p = (const uint8_t *)text;
    mxd_json_put_raw(w, "\"", 1);
    for (size_t at = 0, n; at < len; at += n) {
        size_t from = at; /* a run of characters that need no escape */
        uint32_t c = 0;
        while (at < len && (n = mxd_utf8_decode(p + at, len - at, &c)) > 0 && c >= 0x20 && c != '"' && c != '\\')
            at += n;
        mxd_json_append(w, text + from, at - from);
        if (at == len) break;
        if (n > 0) put_escape(w, p[at]);
        else mxd_json_append(w, "\xEF\xBF\xBD", 3);
        n = 1;
    }
    mxd_json_append(w, "\"", 1);
}

void mxd_json_put_text(mxd_json_writer *w, const char *text) {
    mxd_json_put_string(w, text, strlen(text));
}

void mxd_json_put_integer(mxd_json_writer *w, int64_t value) {
    char text[24];
    int n = snprintf(text, sizeof text, "%" PRId64, value);
    mxd_json_put_raw(w, text, (size_t)n);
}

static int print(char *buf, size_t cap, const char *format, ...) __attribute__((format(printf, 3, 4)));
static int print(char *buf, size_t cap, const char *format, ...) {
    va_list args;
    va_start(args, format);
    int n = mxd_print(buf, cap, format, args);
    va_end(args);
    return n;
}

void mxd_json_put_double(mxd_json_writer *w, double value) {
    char text[40];
    if (!isfinite(value)) {
        mxd_json_put_null(w);
        return;
    }
    int n = 0;
    for (int digits = 15; digits <= 17; digits++) {
        n = print(text, sizeof text, "%.*g", digits, value);
        if (mxd_json_number(text) == value) break;
    }
    mxd_json_put_raw(w, text, (size_t)n);
}

void mxd_json_put_bool(mxd_json_writer *w, bool value) {
    mxd_json_put_raw(w, value ? "true" : "false", value ? 4 : 5);
}

void mxd_json_put_null(mxd_json_writer *w) {
    mxd_json_put_raw(w, "null", 4);
}

void mxd_json_put_node(mxd_json_writer *w, const mxd_json *doc, uint32_t node) {
    const mxd_json_node *value = &doc->nodes[node];
    const char *text = doc->text + value->start;
    switch (value->type) {
    case MXD_JSON_NULL: mxd_json_put_null(w); return;
    case MXD_JSON_FALSE:
    case MXD_JSON_TRUE: mxd_json_put_bool(w, value->type == MXD_JSON_TRUE); return;
    case MXD_JSON_NUMBER: mxd_json_put_raw(w, text, value->len); return;
    case MXD_JSON_STRING: mxd_json_put_string(w, text, value->len); return;
    case MXD_JSON_ARRAY:
    case MXD_JSON_OBJECT: break;
    }
    bool object = value->type == MXD_JSON_OBJECT;
    mxd_json_open(w, object ? '{' : '[');
    for (uint32_t i = mxd_json_first(doc, node); i; i = mxd_json_next(doc, node, i)) {
        mxd_json_put_node(w, doc, i);
        if (!object) continue;
        mxd_json_append(w, ":", 1);
        w->comma = false;
        mxd_json_put_node(w, doc, i + 1);
    }
    mxd_json_close(w, object ? '}' : ']');
}
