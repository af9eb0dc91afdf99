/* SPDX-License-Identifier: Apache-2.0 */
#include "logprobs.h"

#include <stdlib.h>

#include "../src/utf8.h"
#include "put.h"

enum { CHAT_ALTERNATIVES = 20, COMPLETION_ALTERNATIVES = 5 };

bool ask_chat_logprobs(ask *a) {
    bool wanted = false;
    int64_t likely = 0;
    if (!ask_flag(a, 0, "logprobs", &wanted) || !ask_whole(a, 0, "top_logprobs", 0, CHAT_ALTERNATIVES, &likely))
        return false;
    if (likely > 0 && !wanted) {
        refuse(a->server, a->connection, a->dialect, 400, NULL, "'top_logprobs' needs 'logprobs': true");
        return false;
    }
    if (wanted) a->wish.sampling.logprobs = 1 + (uint32_t)likely;
    return true;
}

bool ask_completion_logprobs(ask *a) {
    int64_t likely = -1;
    uint32_t member = ask_member(a, 0, "logprobs");
    if (member && mxd_json_is(&a->json, member, MXD_JSON_FALSE)) return true;
    if (!ask_whole(a, 0, "logprobs", 0, COMPLETION_ALTERNATIVES, &likely)) return false;
    a->wish.sampling.logprobs = (uint32_t)(1 + likely);
    return true;
}

/* ---- lists ---- */

/* A walk over the tokens of a list that have text. */
typedef struct walk {
    const exchange *exchange;
    const mxd_alternative *at, *end;
} walk;

static walk begin(const exchange *e, const text_buffer *list) {
    const mxd_alternative *first = (const mxd_alternative *)(const void *)list->data;
    return (walk){e, first, first ? first + list->length / sizeof *first : NULL};
}

/* Return the entries of the next token; NULL after the last one. */
static const mxd_alternative *next(walk *w) {
    while (w->at < w->end) {
        const mxd_alternative *here = w->at;
        w->at += w->exchange->told;
        if (!mxd_token_is_special(w->exchange->tokenizer, here->token)) return here;
    }
    return NULL;
}

/* Count the entries of a token that name one, its own among them. */
static uint32_t entries(const exchange *e, const mxd_alternative *own) {
    uint32_t n = 1;
    while (n < e->told && own[n].token != UINT32_MAX) n++;
    return n;
}

static size_t characters_of(const exchange *e, uint32_t token) {
    size_t length, count = 0;
    const char *bytes = mxd_token_bytes(e->tokenizer, token, &length);
    for (size_t i = 0; i < length; i++) count += (bytes[i] & 0xC0) != 0x80;
    return count;
}

size_t count_characters(const exchange *e, const text_buffer *list) {
    size_t sum = 0;
    walk w = begin(e, list);
    for (const mxd_alternative *own; (own = next(&w));) sum += characters_of(e, own->token);
    return sum;
}

/* ---- chat ---- */

/* Put what is told of a token into the object that is open. */
static void put_entry(const exchange *e, const mxd_alternative *entry, mxd_json_writer *w) {
    size_t length;
    const char *bytes = mxd_token_bytes(e->tokenizer, entry->token, &length);
    put_string(w, "token", bytes, length);
    put_number(w, "logprob", (double)entry->logprob);
    put_open(w, "bytes", '[');
    for (size_t i = 0; i < length; i++) mxd_json_put_integer(w, (unsigned char)bytes[i]);
    mxd_json_close(w, ']');
}

void put_chat_logprobs(const exchange *e, const text_buffer *list, mxd_json_writer *w) {
    if (!e->told) {
        put_null(w, "logprobs");
        return;
    }
    put_open(w, "logprobs", '{');
    put_open(w, "content", '[');
    walk tokens = begin(e, list);
    for (const mxd_alternative *own; (own = next(&tokens));) {
        mxd_json_open(w, '{');
        put_entry(e, own, w);
        put_open(w, "top_logprobs", '[');
        for (uint32_t i = 1, n = entries(e, own); i < n; i++) {
            mxd_json_open(w, '{');
            put_entry(e, &own[i], w);
            mxd_json_close(w, '}');
        }
        mxd_json_close(w, ']');
        mxd_json_close(w, '}');
    }
    mxd_json_close(w, ']');
    put_null(w, "refusal");
    mxd_json_close(w, '}');
}

/* ---- completions ---- */

static bool is_text(const char *bytes, size_t length) {
    uint32_t c;
    for (size_t i = 0, n; i < length; i += n)
        if (!(n = mxd_utf8_decode((const uint8_t *)bytes + i, length - i, &c))) return false;
    return true;
}

/* Put a token as a string; parts of characters as OpenAI writes them: bytes:\xNN. */
static void put_token(const exchange *e, uint32_t token, mxd_json_writer *w) {
    size_t length;
    const char *bytes = mxd_token_bytes(e->tokenizer, token, &length);
    if (is_text(bytes, length)) {
        mxd_json_put_string(w, bytes, length);
        return;
    }
    text_buffer name = {0};
    append_text(&name, "bytes:");
    for (size_t i = 0; i < length; i++) append_text(&name, "\\x%02x", (unsigned char)bytes[i]);
    mxd_json_put_string(w, name.data, name.length);
    free(name.data);
}

static void put_likely(const exchange *e, const mxd_alternative *own, mxd_json_writer *w) {
    mxd_json_open(w, '{');
    for (uint32_t i = 1, n = entries(e, own); i < n; i++) {
        put_token(e, own[i].token, w);
        mxd_json_append(w, ":", 1);
        w->comma = false;
        mxd_json_put_double(w, (double)own[i].logprob);
    }
    mxd_json_close(w, '}');
}

void put_completion_logprobs(const exchange *e, const text_buffer *list, size_t characters, mxd_json_writer *w) {
    const mxd_alternative *own;
    walk tokens;
    if (!e->told) {
        put_null(w, "logprobs");
        return;
    }
    put_open(w, "logprobs", '{');
    put_open(w, "tokens", '[');
    for (tokens = begin(e, list); (own = next(&tokens));) put_token(e, own->token, w);
    mxd_json_close(w, ']');
    put_open(w, "token_logprobs", '[');
    for (tokens = begin(e, list); (own = next(&tokens));) mxd_json_put_double(w, (double)own->logprob);
    mxd_json_close(w, ']');
    put_open(w, "top_logprobs", '[');
    for (tokens = begin(e, list); (own = next(&tokens));) put_likely(e, own, w);
    mxd_json_close(w, ']');
    put_open(w, "text_offset", '[');
    for (tokens = begin(e, list); (own = next(&tokens));) {
        mxd_json_put_integer(w, (int64_t)characters);
        characters += characters_of(e, own->token);
    }
    mxd_json_close(w, ']');
    mxd_json_close(w, '}');
}
