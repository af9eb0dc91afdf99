/* SPDX-License-Identifier: Apache-2.0 */
/* Fuzz of what a client sends as JSON. Nothing may crash or be read out of bounds (build with AddressSanitizer); what is
 * refused has a status and a message.
 *
 *   structured json SECONDS [--seed S] [--runs N]
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

/* ---- the driver ---- */

int main(int argc, char **argv) {
    uint64_t first = 1, runs = UINT64_MAX, done = 0;
    if (argc < 3) return 2;
    double seconds = atof(argv[2]);
    for (int at = 3; at + 1 < argc; at += 2) {
        uint64_t value = strtoull(argv[at + 1], NULL, 10);
        if (!strcmp(argv[at], "--seed")) first = value;
        else if (!strcmp(argv[at], "--runs")) runs = value;
        else return 2;
    }
    time_t start = time(NULL);
    for (; done < runs && difftime(time(NULL), start) < seconds; done++) {
        rng_state = (seed = first + done) * 0xd1342543de82ef95u;
        if (!strcmp(argv[1], "json")) fuzz_json();
        else return 2;
    }
    printf("%s: %llu runs, %llu accepted, %llu refused\n", argv[1], (unsigned long long)done,
           (unsigned long long)accepted, (unsigned long long)refused);
    return 0;
}
