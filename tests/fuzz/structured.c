/* SPDX-License-Identifier: Apache-2.0 */
/* Fuzz of what a client sends as JSON: documents, and schemas that a model then writes documents of. Nothing may crash or be
 * read out of bounds (build with AddressSanitizer); what is refused has a status and a message.
 *
 *   structured TARGET SECONDS [--seed S] [--runs N] [BUNDLE]        TARGET: json, schema (needs a bundle)
 *
 * Run number i depends on S + i alone: a failure prints the --seed that repeats it, with --runs 1. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "../../runtime/src/json.h"

static uint64_t seed, rng_state;
static uint64_t accepted, refused;

static uint64_t next_random(void) { /* SplitMix64 */
    uint64_t z = rng_state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static size_t below(size_t n) {
    return (size_t)(next_random() % n);
}

static bool one_in(size_t n) {
    return below(n) == 0;
}

__attribute__((noreturn)) static void fail(const char *what) {
    fprintf(stderr, "FAILED --seed %llu: %s\n", (unsigned long long)seed, what);
    abort();
}

/* Count a refusal, and check that it says why. */
static void expect_refusal(mxd_status status, const mxd_error *err) {
    if (err->status != (int32_t)status || !err->message[0]) fail("a refusal without a message");
    refused++;
}

/* ---- JSON ---- */

/* Write a random value of at most `depth` levels. */
static void write_value(mxd_json_writer *w, int depth) {
    char text[12];
    size_t n = below(sizeof text);
    for (size_t i = 0; i < n; i++) text[i] = (char)next_random();
    double number;
    uint64_t bits = next_random();
    memcpy(&number, &bits, sizeof number);
    size_t kind = below(depth > 0 ? 8 : 6);
    if (kind == 0) mxd_json_put_null(w);
    else if (kind == 1) mxd_json_put_bool(w, one_in(2));
    else if (kind == 2) mxd_json_put_integer(w, (int64_t)(next_random() >> below(64)));
    else if (kind == 3) mxd_json_put_double(w, number);
    else if (kind < 6) mxd_json_put_string(w, text, n);
    else {
        bool object = kind == 6;
        mxd_json_open(w, object ? '{' : '[');
        for (size_t i = below(5); i > 0; i--) {
            if (object) mxd_json_name(w, one_in(2) ? "a" : "b\"\n");
            write_value(w, depth - 1);
        }
        mxd_json_close(w, object ? '}' : ']');
    }
}

/* Change, remove or repeat some bytes of text[*n]. */
static void mutate(char *text, size_t *n, size_t cap) {
    static const char marks[] = "{}[],:\"\\u0dD8-+.eE tfn\n\xff\xc3\xa9";
    for (size_t k = 1 + below(3); k > 0 && *n > 0; k--) {
        size_t at = below(*n), len = 1 + below(*n - at);
        switch (below(4)) {
        case 0: text[at] = (char)next_random(); break;
        case 1: text[at] = marks[below(sizeof marks)]; break;
        case 2:
            memmove(text + at, text + at + len, *n - at - len);
            *n -= len;
            break;
        default:
            if (*n + len > cap) break;
            memmove(text + at + len, text + at, *n - at);
            *n += len;
        }
    }
}

/* Write a parsed value again. */
static void rewrite(const mxd_json *doc, uint32_t node, mxd_json_writer *w) {
    size_t len = 0;
    const char *text = mxd_json_text(doc, node, &len);
    mxd_json_type type = doc->nodes[node].type;
    bool object = type == MXD_JSON_OBJECT;
    double number;
    int64_t integer;
    if (type == MXD_JSON_NUMBER) {
        if (mxd_json_integer(doc, node, &integer) && !mxd_json_double(doc, node, &number)) fail("integer, not number");
        if (len != strlen(text)) fail("a number's length");
        mxd_json_put_raw(w, text, len);
    } else if (type == MXD_JSON_STRING) {
        if (text[len]) fail("a string without its NUL");
        mxd_json_put_string(w, text, len);
    } else if (type < MXD_JSON_NUMBER) {
        mxd_json_put_raw(w, mxd_json_type_name(type), strlen(mxd_json_type_name(type)));
    } else {
        uint32_t count = 0;
        mxd_json_open(w, object ? '{' : '[');
        for (uint32_t at = mxd_json_first(doc, node); at; at = mxd_json_next(doc, node, at), count++) {
            if (object) {
                rewrite(doc, at, w);
                mxd_json_append(w, ":", 1);
                w->comma = false;
            }
            rewrite(doc, at + object, w);
        }
        if (count != doc->nodes[node].len) fail("the count of items");
        mxd_json_close(w, object ? '}' : ']');
    }
}

/* Check that a text which was accepted, written again, is a fixed point. */
static void check_rewriting(const mxd_json *doc) {
    mxd_json again;
    mxd_error err;
    mxd_json_writer first, second;
    mxd_json_writer_init(&first, 1 << 24);
    mxd_json_writer_init(&second, 1 << 24);
    rewrite(doc, 0, &first);
    if (first.failed || mxd_json_parse(first.data, first.len, &again, &err)) fail("what is written is refused");
    rewrite(&again, 0, &second);
    if (first.len != second.len || memcmp(first.data, second.data, first.len)) fail("what is written is another value");
    mxd_json_free(&again);
    mxd_json_writer_free(&first);
    mxd_json_writer_free(&second);
}

static void fuzz_json(void) {
    mxd_json doc;
    mxd_error err = {0};
    mxd_json_writer w;
    mxd_json_writer_init(&w, one_in(10) ? below(100) : 1 << 20);
    write_value(&w, 6);
    size_t n = w.len, cap = 4 * n + 64;
    char *text = malloc(cap);
    memcpy(text, w.data ? w.data : "", n);
    bool whole = !w.failed;
    mxd_json_writer_free(&w);
    if (one_in(2)) {
        mutate(text, &n, cap);
        whole = false;
    }
    char *exact = malloc(n ? n : 1); /* so that a read past the end is seen */
    memcpy(exact, text, n);
    mxd_status status = mxd_json_parse(exact, n, &doc, &err);
    free(text);
    if (status) {
        if (whole) fail("what was written is refused");
        expect_refusal(status, &err);
    } else {
        check_rewriting(&doc);
        mxd_json_free(&doc);
        accepted++;
    }
    free(exact);
}

/* ---- schemas ---- */

static void write_schema(mxd_json_writer *w, int depth);

/* Write a list of schemas as the member `name`. */
static void write_choice(mxd_json_writer *w, const char *name, int depth) {
    mxd_json_name(w, name);
    mxd_json_open(w, '[');
    for (size_t i = 1 + below(3); i > 0; i--) write_schema(w, depth);
    mxd_json_close(w, ']');
}

static void write_count(mxd_json_writer *w, const char *name) {
    mxd_json_name(w, name);
    mxd_json_put_integer(w, one_in(30) ? (int64_t)below(5000) : (int64_t)below(4));
}

/* Write a keyword that a schema of some type has. */
static void write_keyword(mxd_json_writer *w, int depth) {
    static const char *const names[] = {"a", "b", "name", "x\n", "\xc3\xa9"};
    static const char *const types[] = {"object", "array", "string", "integer", "number", "boolean", "null", "none"};
    static const char *const others[] = {"pattern", "title", "$defs", "default", "format", "allOf"};
    switch (below(12)) {
    case 0:
    case 1:
    case 2:
        mxd_json_name(w, "type");
        mxd_json_put_text(w, types[below(one_in(20) ? 8 : 7)]);
        break;
    case 3: write_count(w, one_in(2) ? "minItems" : "maxItems"); break;
    case 4: write_count(w, one_in(2) ? "minLength" : "maxLength"); break;
    case 5:
        mxd_json_name(w, "items");
        write_schema(w, depth);
        break;
    case 6:
        mxd_json_name(w, "required");
        mxd_json_open(w, '[');
        for (size_t i = below(3); i > 0; i--) mxd_json_put_text(w, names[below(2)]);
        mxd_json_close(w, ']');
        break;
    case 7:
    case 8:
        mxd_json_name(w, "properties");
        mxd_json_open(w, '{');
        for (size_t i = below(4); i > 0; i--) {
            mxd_json_name(w, names[below(5)]);
            write_schema(w, depth);
        }
        mxd_json_close(w, '}');
        break;
    case 9:
        mxd_json_name(w, "additionalProperties");
        if (one_in(2)) mxd_json_put_bool(w, one_in(2));
        else write_schema(w, depth);
        break;
    default: mxd_json_name(w, others[below(6)]); write_value(w, 1);
    }
}

/* Write a schema, mostly one that makes sense, of at most `depth` levels. */
static void write_schema(mxd_json_writer *w, int depth) {
    static const char *const references[] = {"#", "#/$defs/a", "#/properties/a", "#/items", "#/~1~0x", "x"};
    if (one_in(20)) {
        write_value(w, 1);
        return;
    }
    mxd_json_open(w, '{');
    size_t kind = below(10);
    if (depth == 0 || kind == 0) {
        mxd_json_name(w, one_in(3) ? "const" : "enum");
        mxd_json_open(w, '[');
        for (size_t i = below(4); i > 0; i--) write_value(w, 2);
        mxd_json_close(w, ']');
    } else if (kind == 1) {
        write_choice(w, one_in(2) ? "anyOf" : "oneOf", depth - 1);
    } else if (kind == 2 && one_in(2)) {
        mxd_json_name(w, "$ref");
        mxd_json_put_text(w, references[below(6)]);
    } else {
        for (size_t i = below(5); i > 0; i--) write_keyword(w, depth - 1);
    }
    mxd_json_close(w, '}');
}

/* Write a document and check that it is JSON, or the beginning of it where the limit cut it. */
static void check_document(mxd_engine *g, mxd_grammar *grammar) {
    static char text[1 << 16];
    mxd_sampling p;
    mxd_seq *s;
    mxd_error err;
    mxd_json doc;
    size_t len = 0;
    uint32_t ids[4];
    for (size_t i = 0; i < 4; i++) ids[i] = 3 + (uint32_t)below(256);
    mxd_sampling_default(&p);
    p.temperature = one_in(2) ? 0 : 1;
    p.seed = next_random();
    p.max_tokens = 1 + (uint32_t)below(80);
    if (mxd_seq_open(g, &p, &s, &err) || mxd_seq_set_grammar(s, grammar, 0, &err)) fail("no sequence");
    if (mxd_seq_prompt(s, ids, 4, &err)) fail("no prompt");
    while (mxd_seq_stop(s) == MXD_STOP_NONE) {
        size_t n;
        if (mxd_step(g, &s, 1, &err)) fail(err.message);
        const char *more = mxd_seq_text(s, &n);
        memcpy(text + len, more, n);
        len += n;
    }
    mxd_stop stop = mxd_seq_stop(s);
    if (stop == MXD_STOP_STRING || stop == MXD_STOP_CONTEXT) fail("an impossible stop");
    mxd_status status = mxd_json_parse(text, len, &doc, &err);
    if (stop != MXD_STOP_LIMIT && status) fail("a document that is not JSON");
    if (!status) mxd_json_free(&doc);
    mxd_seq_close(&s);
}

static void fuzz_schema(const mxd_model *m, mxd_engine *g) {
    mxd_json_writer w;
    mxd_error err = {0};
    mxd_grammar *grammar;
    mxd_json_writer_init(&w, 1 << 16);
    bool tools = one_in(6);
    if (tools) {
        mxd_json_open(&w, '[');
        mxd_json_open(&w, '{');
        mxd_json_name(&w, "name");
        mxd_json_put_text(&w, "a\"b");
        mxd_json_name(&w, "parameters");
    }
    write_schema(&w, 3);
    if (tools) {
        mxd_json_close(&w, '}');
        mxd_json_close(&w, ']');
    }
    if (w.failed) {
        mxd_json_writer_free(&w);
        return;
    }
    if (one_in(8)) mutate(w.data, &w.len, w.cap);
    mxd_status status = tools ? mxd_grammar_compile_tools(m, w.data, w.len, one_in(2) ? NULL : "a\"b", &grammar, &err)
                              : mxd_grammar_compile(m, w.data, w.len, &grammar, &err);
    mxd_json_writer_free(&w);
    if (status) {
        expect_refusal(status, &err);
        return;
    }
    check_document(g, grammar);
    mxd_grammar_free(&grammar);
    accepted++;
}

/* ---- the driver ---- */

int main(int argc, char **argv) {
    uint64_t first = 1, runs = UINT64_MAX, done = 0;
    if (argc < 3) return 2;
    double seconds = atof(argv[2]);
    int at = 3;
    for (; at + 1 < argc && argv[at][0] == '-'; at += 2) {
        uint64_t value = strtoull(argv[at + 1], NULL, 10);
        if (!strcmp(argv[at], "--seed")) first = value;
        else if (!strcmp(argv[at], "--runs")) runs = value;
        else return 2;
    }
    mxd_model *model = NULL;
    mxd_engine *engine = NULL;
    mxd_options o;
    mxd_error err;
    mxd_options_default(&o);
    o.ctx = 100;
    o.threads = 1;
    o.draft_min = 2;
    if (at < argc && (mxd_model_open(argv[at], &model, &err) || mxd_engine_open(model, &o, &engine, &err))) return 3;
    time_t start = time(NULL);
    for (; done < runs && difftime(time(NULL), start) < seconds; done++) {
        rng_state = (seed = first + done) * 0xd1342543de82ef95u;
        if (!strcmp(argv[1], "json")) fuzz_json();
        else if (!strcmp(argv[1], "schema") && engine) fuzz_schema(model, engine);
        else return 2;
    }
    mxd_engine_close(&engine);
    mxd_model_close(&model);
    printf("%s: %llu runs, %llu accepted, %llu refused\n", argv[1], (unsigned long long)done,
           (unsigned long long)accepted, (unsigned long long)refused);
    return 0;
}
