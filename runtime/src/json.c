/* SPDX-License-Identifier: Apache-2.0 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "json.h"

#include <locale.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "utf8.h"

/* ---- reading ---- */

typedef struct parser {
    const uint8_t *text;
    size_t len, at;
    mxd_json *doc;
    size_t text_used;
    mxd_error *err;
} parser;

static mxd_status refuse(const parser *p, const char *what) {
    return mxd_fail(p->err, MXD_ERR_ARGUMENT, "JSON: %s at byte %zu", what, p->at);
}

static int peek(const parser *p) {
    return p->at < p->len ? p->text[p->at] : -1;
}

static bool take(parser *p, char c) {
    if (peek(p) != c) return false;
    p->at++;
    return true;
}

static void skip_space(parser *p) {
    for (int c = peek(p); c == ' ' || c == '\n' || c == '\r' || c == '\t'; c = peek(p)) p->at++;
}

static uint32_t add_node(parser *p, mxd_json_type type) {
    uint32_t index = p->doc->count++;
    p->doc->nodes[index] = (mxd_json_node){.type = type, .end = index + 1};
    return index;
}

static void put_byte(parser *p, uint8_t byte) {
    p->doc->text[p->text_used++] = (char)byte;
}

static void put_character(parser *p, uint32_t c) {
    if (c < 0x80) {
        put_byte(p, (uint8_t)c);
        return;
    }
    int more = c < 0x800 ? 1 : c < 0x10000 ? 2 : 3;
    static const uint8_t lead[] = {0, 0xC0, 0xE0, 0xF0};
    put_byte(p, (uint8_t)(lead[more] | c >> 6 * more));
    while (more-- > 0) put_byte(p, (uint8_t)(0x80 | (c >> 6 * more & 0x3F)));
}

/* Read four hexadecimal digits; -1 if they are not there. */
static int32_t read_hex(parser *p) {
    int32_t value = 0;
    for (int i = 0; i < 4; i++) {
        int c = peek(p);
        int digit = c >= '0' && c <= '9'   ? c - '0'
                    : c >= 'a' && c <= 'f' ? c - 'a' + 10
                    : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                           : -1;
        if (digit < 0) return -1;
        value = value << 4 | digit;
        p->at++;
    }
    return value;
}

/* Read what follows a backslash. */
static mxd_status read_escape(parser *p) {
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    int c = peek(p);
    const char *found = c > 0 ? strchr(from, c) : NULL;
    if (found) {
        p->at++;
        put_byte(p, (uint8_t)to[found - from]);
        return MXD_OK;
    }
    if (!take(p, 'u')) return refuse(p, "unknown escape");
    int32_t high = read_hex(p);
    if (high < 0) return refuse(p, "\\u without four hexadecimal digits");
    if (high < 0xD800 || high > 0xDFFF) {
        put_character(p, (uint32_t)high);
        return MXD_OK;
    }
    int32_t low = high < 0xDC00 && take(p, '\\') && take(p, 'u') ? read_hex(p) : -1;
    if (low < 0xDC00 || low > 0xDFFF) return refuse(p, "half a surrogate pair");
    put_character(p, 0x10000u + ((uint32_t)(high - 0xD800) << 10) + (uint32_t)(low - 0xDC00));
    return MXD_OK;
}

static mxd_status read_string(parser *p) {
    mxd_json_node *node = &p->doc->nodes[add_node(p, MXD_JSON_STRING)];
    node->start = (uint32_t)p->text_used;
    p->at++;
    while (!take(p, '"')) {
        uint32_t c;
        size_t n = mxd_utf8_decode(p->text + p->at, p->len - p->at, &c);
        if (n == 0) return refuse(p, p->at < p->len ? "invalid UTF-8" : "a string without its end");
        if (c < 0x20) return refuse(p, "a control character in a string");
        mxd_status status = MXD_OK;
        if (take(p, '\\')) status = read_escape(p);
        else
            while (n--) put_byte(p, p->text[p->at++]);
        if (status) return status;
    }
    node->len = (uint32_t)(p->text_used - node->start);
    put_byte(p, 0);
    return MXD_OK;
}

static bool skip_digits(parser *p) {
    size_t from = p->at;
    while (peek(p) >= '0' && peek(p) <= '9') p->at++;
    return p->at > from;
}

static mxd_status read_number(parser *p) {
    mxd_json_node *node = &p->doc->nodes[add_node(p, MXD_JSON_NUMBER)];
    size_t from = p->at;
    take(p, '-');
    if (!take(p, '0') && !skip_digits(p)) return refuse(p, "expected a digit");
    if (take(p, '.') && !skip_digits(p)) return refuse(p, "expected a digit");
    if (take(p, 'e') || take(p, 'E')) {
        if (!take(p, '+')) take(p, '-');
        if (!skip_digits(p)) return refuse(p, "expected a digit");
    }
    node->start = (uint32_t)p->text_used;
    node->len = (uint32_t)(p->at - from);
    memcpy(p->doc->text + p->text_used, p->text + from, node->len);
    p->text_used += node->len;
    put_byte(p, 0);
    return MXD_OK;
}

static mxd_status read_word(parser *p, mxd_json_type type) {
    const char *word = mxd_json_type_name(type);
    size_t n = strlen(word);
    if (p->len - p->at < n || memcmp(p->text + p->at, word, n)) return refuse(p, "expected a value");
    p->at += n;
    add_node(p, type);
    return MXD_OK;
}

static mxd_status read_value(parser *p, int depth);

/* Read an array or object; `depth` counts those around it. */
static mxd_status read_nested(parser *p, bool object, int depth) {
    if (depth == MXD_JSON_MAX_DEPTH) return refuse(p, "more than 64 nested arrays and objects");
    uint32_t index = add_node(p, object ? MXD_JSON_OBJECT : MXD_JSON_ARRAY), count = 0;
    char end = object ? '}' : ']';
    p->at++;
    skip_space(p);
    while (count > 0 || !take(p, end)) {
        mxd_status status = MXD_OK;
        if (object) {
            skip_space(p);
            if (peek(p) != '"') return refuse(p, "expected a name in quotes");
            status = read_string(p);
            skip_space(p);
            if (!status && !take(p, ':')) return refuse(p, "expected ':'");
        }
        if (!status) status = read_value(p, depth + 1);
        if (status) return status;
        count++;
        if (take(p, end)) break;
        if (!take(p, ',')) return refuse(p, object ? "expected ',' or '}'" : "expected ',' or ']'");
    }
    p->doc->nodes[index].len = count;
    p->doc->nodes[index].end = p->doc->count;
    return MXD_OK;
}

/* Read a value and the white space around it. */
static mxd_status read_value(parser *p, int depth) {
    mxd_status status;
    skip_space(p);
    switch (peek(p)) {
    case '{': status = read_nested(p, true, depth); break;
    case '[': status = read_nested(p, false, depth); break;
    case '"': status = read_string(p); break;
    case 'n': status = read_word(p, MXD_JSON_NULL); break;
    case 'f': status = read_word(p, MXD_JSON_FALSE); break;
    case 't': status = read_word(p, MXD_JSON_TRUE); break;
    case '-': status = read_number(p); break;
    default:
        if (peek(p) < '0' || peek(p) > '9') return refuse(p, "expected a value");
        status = read_number(p);
    }
    skip_space(p);
    return status;
}

/* Return the most nodes that a text can have: but for the first, each comes after one of these outside strings. */
static size_t most_nodes(const char *text, size_t len) {
    size_t count = 1;
    bool in_string = false;
    for (size_t i = 0; i < len; i++) {
        char c = text[i];
        if (c == '"') in_string = !in_string;
        else if (in_string) i += c == '\\';
        else count += c == '[' || c == '{' || c == ',' || c == ':';
    }
    return count;
}

mxd_status mxd_json_parse(const char *text, size_t len, mxd_json *out, mxd_error *err) {
    *out = (mxd_json){0};
    if (len > MXD_JSON_MAX_BYTES)
        return mxd_fail(err, MXD_ERR_ARGUMENT, "JSON: %zu bytes: at most %d are read", len, MXD_JSON_MAX_BYTES);
    size_t room = most_nodes(text, len) * sizeof *out->nodes;
    out->nodes = malloc(room + len + 1); /* a decoded string and its NUL are shorter than it is in quotes */
    if (!out->nodes) return mxd_fail(err, MXD_ERR_MEMORY, "out of memory for %zu bytes of JSON", len);
    out->text = (char *)out->nodes + room;
    parser p = {.text = (const uint8_t *)text, .len = len, .doc = out, .err = err};
    mxd_status status = read_value(&p, 0);
    if (!status && p.at < len) status = refuse(&p, "text after the document");
    if (status) mxd_json_free(out);
    return status;
}

void mxd_json_free(mxd_json *doc) {
    free(doc->nodes);
    *doc = (mxd_json){0};
}

uint32_t mxd_json_first(const mxd_json *doc, uint32_t node) {
    const mxd_json_node *n = &doc->nodes[node];
    return (n->type == MXD_JSON_ARRAY || n->type == MXD_JSON_OBJECT) && n->len > 0 ? node + 1 : 0;
}

uint32_t mxd_json_next(const mxd_json *doc, uint32_t node, uint32_t item) {
    uint32_t value = item + (doc->nodes[node].type == MXD_JSON_OBJECT), next = doc->nodes[value].end;
    return next < doc->nodes[node].end ? next : 0;
}

uint32_t mxd_json_get(const mxd_json *doc, uint32_t node, const char *name) {
    uint32_t found = 0;
    if (!mxd_json_is(doc, node, MXD_JSON_OBJECT)) return 0;
    for (uint32_t at = mxd_json_first(doc, node); at; at = mxd_json_next(doc, node, at))
        if (mxd_json_equals(doc, at, name)) found = at + 1;
    return found;
}

const char *mxd_json_text(const mxd_json *doc, uint32_t node, size_t *len) {
    if (len) *len = doc->nodes[node].len;
    return doc->text + doc->nodes[node].start;
}

bool mxd_json_is(const mxd_json *doc, uint32_t node, mxd_json_type type) {
    return doc->nodes[node].type == type;
}

bool mxd_json_equals(const mxd_json *doc, uint32_t node, const char *text) {
    size_t len = strlen(text);
    return mxd_json_is(doc, node, MXD_JSON_STRING) && doc->nodes[node].len == len &&
           !memcmp(mxd_json_text(doc, node, NULL), text, len);
}

double mxd_json_number(const char *text) {
    locale_t plain = newlocale(LC_ALL_MASK, "C", (locale_t)0), around = uselocale(plain);
    double value = strtod(text, NULL);
    uselocale(around);
    if (plain) freelocale(plain);
    return value;
}

bool mxd_json_double(const mxd_json *doc, uint32_t node, double *out) {
    if (!mxd_json_is(doc, node, MXD_JSON_NUMBER)) return false;
    *out = mxd_json_number(mxd_json_text(doc, node, NULL));
    return isfinite(*out);
}

bool mxd_json_integer(const mxd_json *doc, uint32_t node, int64_t *out) {
    double value;
    if (!mxd_json_double(doc, node, &value)) return false;
    const char *text = mxd_json_text(doc, node, NULL), *digits = text + (*text == '-');
    if (strpbrk(text, ".eE")) {
        if (fabs(value) > 0x1p53 || value != floor(value)) return false;
        *out = (int64_t)value;
        return true;
    }
    uint64_t magnitude = 0, most = (uint64_t)INT64_MAX + (*text == '-');
    for (; *digits; digits++) {
        uint64_t digit = (uint64_t)(*digits - '0');
        if (magnitude > (most - digit) / 10) return false;
        magnitude = 10 * magnitude + digit;
    }
    *out = *text == '-' ? (int64_t)(0 - magnitude) : (int64_t)magnitude;
    return true;
}

const char *mxd_json_type_name(mxd_json_type type) {
    static const char *const names[] = {"null", "false", "true", "number", "string", "array", "object"};
    return names[type];
}
