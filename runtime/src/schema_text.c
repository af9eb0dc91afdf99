/* SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "schema.h"

enum { DIGITS = 15, EXPONENT_DIGITS = 2 };

mxd_piece mxd_piece_text(mxd_nfa *n, const char *text) {
    return mxd_piece_bytes(n, text, strlen(text));
}

mxd_piece mxd_piece_times(mxd_nfa *n, mxd_piece_maker *make, void *arg, const char *separator, uint32_t min,
                          uint32_t max) {
    uint32_t copies = max < UINT32_MAX ? max : min > 0 ? min : 1, end = mxd_nfa_add(n);
    mxd_piece all = mxd_piece_empty(n), last = all;
    for (uint32_t i = 0; i < copies && !n->failed; i++) {
        if (i >= min) mxd_nfa_link(n, all.out, end);
        if (i > 0) all = mxd_piece_then(n, all, mxd_piece_text(n, separator));
        last = make(n, arg);
        all = mxd_piece_then(n, all, last);
    }
    if (max == UINT32_MAX) { /* the last one again and again */
        mxd_piece again = mxd_piece_text(n, separator);
        mxd_nfa_link(n, last.out, again.in);
        mxd_nfa_link(n, again.out, last.in);
    }
    mxd_nfa_link(n, all.out, end);
    return (mxd_piece){all.in, end};
}

/* ---- strings ---- */

static mxd_piece ranges(mxd_nfa *n, const uint8_t (*range)[2], size_t count) {
    mxd_piece p = mxd_piece_empty(n);
    for (size_t i = 0; i < count; i++) p = mxd_piece_then(n, p, mxd_piece_range(n, range[i][0], range[i][1]));
    return p;
}

static mxd_piece hex_digit(mxd_nfa *n, void *arg) {
    (void)arg;
    return mxd_piece_or(n, mxd_piece_range(n, '0', '9'),
                        mxd_piece_or(n, mxd_piece_range(n, 'a', 'f'), mxd_piece_range(n, 'A', 'F')));
}

/* What may follow a backslash; no surrogates, since half a pair would be no text. */
static mxd_piece escape(mxd_nfa *n) {
    static const uint8_t first[][2] = {{'0', '9'}, {'a', 'c'}, {'e', 'f'}, {'A', 'C'}, {'E', 'F'}};
    mxd_piece d = mxd_piece_or(n, mxd_piece_range(n, 'd', 'd'), mxd_piece_range(n, 'D', 'D'));
    mxd_piece code = mxd_piece_then(n, d, mxd_piece_range(n, '0', '7')), other = ranges(n, first, 1);
    for (size_t i = 1; i < sizeof first / sizeof *first; i++) other = mxd_piece_or(n, other, ranges(n, first + i, 1));
    code = mxd_piece_or(n, code, mxd_piece_then(n, other, hex_digit(n, NULL)));
    code = mxd_piece_then(n, code, mxd_piece_times(n, hex_digit, NULL, "", 2, 2));
    mxd_piece p = mxd_piece_then(n, mxd_piece_text(n, "u"), code);
    for (const char *c = "\"\\/bfnrt"; *c; c++) p = mxd_piece_or(n, p, mxd_piece_bytes(n, c, 1));
    return mxd_piece_then(n, mxd_piece_text(n, "\\"), p);
}

/* A character of a string: UTF-8 as Unicode defines it. */
static mxd_piece character(mxd_nfa *n, void *arg) {
    static const uint8_t range[][2] = {
        {0x20, 0x21},                                           /* all but quote, */
        {0x23, 0x5B},                                           /* backslash */
        {0x5D, 0x7F},                                           /* and control characters */
        {0xC2, 0xDF}, {0x80, 0xBF},                             /* */
        {0xE0, 0xE0}, {0xA0, 0xBF}, {0x80, 0xBF},               /* */
        {0xE1, 0xEC}, {0x80, 0xBF}, {0x80, 0xBF},               /* */
        {0xED, 0xED}, {0x80, 0x9F}, {0x80, 0xBF},               /* */
        {0xEE, 0xEF}, {0x80, 0xBF}, {0x80, 0xBF},               /* */
        {0xF0, 0xF0}, {0x90, 0xBF}, {0x80, 0xBF}, {0x80, 0xBF}, /* */
        {0xF1, 0xF3}, {0x80, 0xBF}, {0x80, 0xBF}, {0x80, 0xBF}, /* */
        {0xF4, 0xF4}, {0x80, 0x8F}, {0x80, 0xBF}, {0x80, 0xBF},
    };
    static const uint8_t lengths[] = {1, 1, 1, 2, 3, 3, 3, 3, 4, 4, 4};
    (void)arg;
    mxd_piece p = escape(n);
    for (size_t i = 0, at = 0; i < sizeof lengths; at += lengths[i++])
        p = mxd_piece_or(n, p, ranges(n, range + at, lengths[i]));
    return p;
}

static mxd_piece between(mxd_nfa *n, const char *before, mxd_piece p, const char *after) {
    return mxd_piece_then(n, mxd_piece_then(n, mxd_piece_text(n, before), p), mxd_piece_text(n, after));
}

mxd_piece mxd_piece_string(mxd_nfa *n, uint32_t min, uint32_t max) {
    return between(n, "\"", mxd_piece_times(n, character, NULL, "", min, max), "\"");
}

/* ---- numbers ---- */

static mxd_piece digit(mxd_nfa *n, void *arg) {
    (void)arg;
    return mxd_piece_range(n, '0', '9');
}

mxd_piece mxd_piece_number(mxd_nfa *n, bool integer) {
    mxd_piece sign = mxd_piece_maybe(n, mxd_piece_text(n, "-"));
    mxd_piece whole = mxd_piece_then(n, mxd_piece_range(n, '1', '9'),
                                     mxd_piece_times(n, digit, NULL, "", 0, DIGITS - 1));
    whole = mxd_piece_then(n, sign, mxd_piece_or(n, mxd_piece_text(n, "0"), whole));
    if (integer) return whole;
    mxd_piece fraction = mxd_piece_then(n, mxd_piece_text(n, "."), mxd_piece_times(n, digit, NULL, "", 1, DIGITS));
    mxd_piece exponent = mxd_piece_or(n, mxd_piece_text(n, "e"), mxd_piece_text(n, "E"));
    sign = mxd_piece_maybe(n, mxd_piece_or(n, mxd_piece_text(n, "-"), mxd_piece_text(n, "+")));
    exponent = mxd_piece_then(n, mxd_piece_then(n, exponent, sign),
                              mxd_piece_times(n, digit, NULL, "", 1, EXPONENT_DIGITS));
    return mxd_piece_then(n, whole, mxd_piece_then(n, mxd_piece_maybe(n, fraction), mxd_piece_maybe(n, exponent)));
}

/* ---- values ---- */

static mxd_piece literal_string(mxd_nfa *n, const mxd_json *doc, uint32_t node) {
    size_t len;
    const char *text = mxd_json_text(doc, node, &len);
    mxd_json_writer w;
    mxd_json_writer_init(&w, SIZE_MAX / 2);
    mxd_json_put_string(&w, text, len);
    n->failed |= w.failed;
    n->no_memory |= w.failed;
    mxd_piece p = mxd_piece_bytes(n, w.data, w.failed ? 0 : w.len);
    mxd_json_writer_free(&w);
    return p;
}

mxd_piece mxd_piece_literal(mxd_nfa *n, const mxd_json *doc, uint32_t node) {
    const mxd_json_node *value = &doc->nodes[node];
    if (value->type == MXD_JSON_STRING) return literal_string(n, doc, node);
    if (value->type == MXD_JSON_NUMBER) return mxd_piece_text(n, mxd_json_text(doc, node, NULL));
    if (value->type < MXD_JSON_NUMBER) return mxd_piece_text(n, mxd_json_type_name(value->type));
    bool object = value->type == MXD_JSON_OBJECT;
    mxd_piece p = mxd_piece_empty(n);
    for (uint32_t at = mxd_json_first(doc, node), i = 0; at; at = mxd_json_next(doc, node, at), i++) {
        if (i > 0) p = mxd_piece_then(n, p, mxd_piece_text(n, ", "));
        if (object) p = mxd_piece_then(n, mxd_piece_then(n, p, literal_string(n, doc, at)), mxd_piece_text(n, ": "));
        p = mxd_piece_then(n, p, mxd_piece_literal(n, doc, at + object));
    }
    return between(n, object ? "{" : "[", p, object ? "}" : "]");
}

static mxd_piece any_item(mxd_nfa *n, void *depth) {
    return mxd_piece_any(n, *(int *)depth);
}

static mxd_piece any_member(mxd_nfa *n, void *depth) {
    mxd_piece name = mxd_piece_then(n, mxd_piece_string(n, 0, UINT32_MAX), mxd_piece_text(n, ": "));
    return mxd_piece_then(n, name, any_item(n, depth));
}

mxd_piece mxd_piece_any_array(mxd_nfa *n, int depth, uint32_t min, uint32_t max) {
    return between(n, "[", mxd_piece_times(n, any_item, &depth, ", ", min, max), "]");
}

mxd_piece mxd_piece_any_object(mxd_nfa *n, int depth) {
    return between(n, "{", mxd_piece_times(n, any_member, &depth, ", ", 0, UINT32_MAX), "}");
}

mxd_piece mxd_piece_any(mxd_nfa *n, int depth) {
    mxd_piece p = mxd_piece_or(n, mxd_piece_string(n, 0, UINT32_MAX), mxd_piece_number(n, false));
    p = mxd_piece_or(n, p, mxd_piece_text(n, "null"));
    p = mxd_piece_or(n, p, mxd_piece_text(n, "true"));
    p = mxd_piece_or(n, p, mxd_piece_text(n, "false"));
    if (depth == 0) return p;
    p = mxd_piece_or(n, p, mxd_piece_any_array(n, depth - 1, 0, UINT32_MAX));
    return mxd_piece_or(n, p, mxd_piece_any_object(n, depth - 1));
}
