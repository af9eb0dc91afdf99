/* SPDX-License-Identifier: Apache-2.0 */
/* The results as text: a table, CSV or JSON. */
#include <math.h>
#include <stdbool.h>

#include "../src/put.h"
#include "bench.h"

/* The name of each measure, and the unit in which the table shows it. */
static const struct {
    const char *key, *label, *unit;
    double scale;
} NAMES[MEASURES] = {
    [PREFILL] = {"prefill_tok_per_s", "prefill", "tok/s", 1},
    [DECODE] = {"decode_tok_per_s", "decode", "tok/s", 1},
    [DRIFT] = {"decode_drift", "decode, end / begin", "%", 100},
    [FIRST_TOKEN] = {"first_token_s", "first token", "ms", 1e3},
    [DECODE_READ] = {"decode_gb_per_s", "decode reads", "GB/s", 1},
    [BANDWIDTH] = {"bandwidth_gb_per_s", "read bandwidth", "GB/s", 1},
    [SHARE] = {"bandwidth_share", "decode reads / bandwidth", "%", 100},
    [ONE_ROW] = {"row_step_s", "step of 1 row", "ms", 1e3},
    [ROWS + 0] = {"row_cost_1", "1 row", "x 1 row", 1},
    [ROWS + 1] = {"row_cost_2", "2 rows", "x 1 row", 1},
    [ROWS + 2] = {"row_cost_3", "3 rows", "x 1 row", 1},
    [ROWS + 3] = {"row_cost_4", "4 rows", "x 1 row", 1},
    [ROWS + 4] = {"row_cost_6", "6 rows", "x 1 row", 1},
    [ROWS + 5] = {"row_cost_8", "8 rows", "x 1 row", 1},
    [ROWS + 6] = {"row_cost_12", "12 rows", "x 1 row", 1},
    [ROWS + 7] = {"row_cost_16", "16 rows", "x 1 row", 1},
    [BATCH_COST] = {"sequence_cost_48", "48 sequences", "x 1 sequence", 1},
    [BATCH_SPEED] = {"batch48_tok_per_s", "48 sequences", "tok/s", 1},
    [TEMPERATURE] = {"temperature_c", "temperature", "C", 1},
    [DRAFT_SPEED + 0] = {"draft_off_tok_per_s", "answers, draft off", "tok/s", 1},
    [DRAFT_SPEED + 1] = {"draft_ngram_tok_per_s", "answers, draft ngram", "tok/s", 1},
    [DRAFT_SPEED + 2] = {"draft_model_tok_per_s", "answers, draft model", "tok/s", 1},
    [DRAFT_SPEED + 3] = {"draft_auto_tok_per_s", "answers, draft auto", "tok/s", 1},
    [DRAFT_GAIN + 0] = {"draft_off_gain", "draft off", "x off", 1},
    [DRAFT_GAIN + 1] = {"draft_ngram_gain", "draft ngram", "x off", 1},
    [DRAFT_GAIN + 2] = {"draft_model_gain", "draft model", "x off", 1},
    [DRAFT_GAIN + 3] = {"draft_auto_gain", "draft auto", "x off", 1},
    [DRAFT_TAU + 0] = {"draft_off_tokens_per_step", "draft off", "tokens/step", 1},
    [DRAFT_TAU + 1] = {"draft_ngram_tokens_per_step", "draft ngram", "tokens/step", 1},
    [DRAFT_TAU + 2] = {"draft_model_tokens_per_step", "draft model", "tokens/step", 1},
    [DRAFT_TAU + 3] = {"draft_auto_tokens_per_step", "draft auto", "tokens/step", 1},
};

typedef struct spread {
    bool measured;
    double median, min, max;
} spread;

static spread spread_of(const mxd_series *s) {
    if (!s->count) return (spread){false};
    spread out = {true, mxd_bench_median(s->values, s->count), s->values[0], s->values[0]};
    for (size_t i = 1; i < s->count; i++) {
        out.min = fmin(out.min, s->values[i]);
        out.max = fmax(out.max, s->values[i]);
    }
    return out;
}

/* Return whether the machine was throttled meanwhile: at a moment looked at, or between two of them. */
static bool throttled(const mxd_bench *b) {
    int64_t new_flags = b->flags_seen & ~b->flags_before;
    return (b->flags_seen & 0xF) != 0 || (new_flags & 0xF0000) != 0;
}

static void put_table(mxd_text *t, const mxd_bench *b) {
    const mxd_bench_options *o = &b->options;
    mxd_put(t, "prompt %u, generated %u, repetitions %u, threads %u, precision %s, %s\n", o->prompt_tokens, o->tokens,
            o->repeat, b->threads, mxd_precision_name(b->precision), b->kernel);
    mxd_put(t, "%-26s%10s%10s%10s\n", "", "median", "min", "max");
    for (int i = 0; i < MEASURES; i++) {
        const spread v = spread_of(&b->measures[i]);
        const double scale = NAMES[i].scale;
        if (i >= DRAFT_SPEED && !v.measured) continue; /* not asked for */
        mxd_put(t, "%-26s", NAMES[i].label);
        if (!v.measured) mxd_put(t, "%10s\n", "-");
        else mxd_put(t, "%10.2f%10.2f%10.2f  %s\n", v.median * scale, v.min * scale, v.max * scale, NAMES[i].unit);
    }
    mxd_put(t, "%-26s%10.2f%20s  MB\n", "bytes a token", 1e-6 * b->bytes_per_token, "");
    mxd_put(t, "%-26s%10.2f%20s  MB\n", "peak memory", 1e-6 * (double)b->peak_rss_bytes, "");
    mxd_put(t, "%-26s%10s", "throttled", b->flags_before < 0 ? "-" : throttled(b) ? "yes" : "no");
    if (b->flags_before >= 0) mxd_put(t, "%20s  0x%x", "", (unsigned)b->flags_seen);
    mxd_put(t, "\n");
}

static void put_csv(mxd_text *t, const mxd_bench *b) {
    const mxd_bench_options *o = &b->options;
    mxd_put(t, "measure,median,min,max\n");
    mxd_put(t, "version,%s,,\nprecision,%s,,\nkernel,%s,,\nthreads,%u,,\n", mxd_version(),
            mxd_precision_name(b->precision), b->kernel, b->threads);
    mxd_put(t, "prompt_tokens,%u,,\ngenerated_tokens,%u,,\nrepeat,%u,,\n", o->prompt_tokens, o->tokens, o->repeat);
    for (int i = 0; i < MEASURES; i++) {
        const spread v = spread_of(&b->measures[i]);
        if (!v.measured) mxd_put(t, "%s,,,\n", NAMES[i].key);
        else mxd_put(t, "%s,%.6g,%.6g,%.6g\n", NAMES[i].key, v.median, v.min, v.max);
    }
    mxd_put(t, "bytes_per_token,%.0f,,\npeak_rss_bytes,%llu,,\n", b->bytes_per_token,
            (unsigned long long)b->peak_rss_bytes);
    if (b->flags_before < 0) mxd_put(t, "throttled,,,\nthrottle_flags,,,\n");
    else mxd_put(t, "throttled,%d,,\nthrottle_flags,%u,,\n", throttled(b), (unsigned)b->flags_seen);
}

static void put_json(mxd_text *t, const mxd_bench *b) {
    const mxd_bench_options *o = &b->options;
    mxd_put(t, "{\"version\": \"%s\", \"precision\": \"%s\", \"kernel\": \"%s\", \"threads\": %u, ", mxd_version(),
            mxd_precision_name(b->precision), b->kernel, b->threads);
    mxd_put(t, "\"prompt_tokens\": %u, \"generated_tokens\": %u, \"repeat\": %u, ", o->prompt_tokens, o->tokens,
            o->repeat);
    for (int i = 0; i < MEASURES; i++) {
        const spread v = spread_of(&b->measures[i]);
        mxd_put(t, "\"%s\": ", NAMES[i].key);
        if (!v.measured) mxd_put(t, "null, ");
        else mxd_put(t, "{\"median\": %.6g, \"min\": %.6g, \"max\": %.6g}, ", v.median, v.min, v.max);
    }
    mxd_put(t, "\"bytes_per_token\": %.0f, \"peak_rss_bytes\": %llu, ", b->bytes_per_token,
            (unsigned long long)b->peak_rss_bytes);
    if (b->flags_before < 0) mxd_put(t, "\"throttled\": null, \"throttle_flags\": null}\n");
    else
        mxd_put(t, "\"throttled\": %s, \"throttle_flags\": %u}\n", throttled(b) ? "true" : "false",
                (unsigned)b->flags_seen);
}

size_t mxd_bench_text(const mxd_bench *b, mxd_bench_format format, char *buf, size_t cap) {
    mxd_text t = {buf, cap, 0};
    if (cap) buf[0] = '\0';
    switch (format) {
    case MXD_BENCH_TABLE: put_table(&t, b); break;
    case MXD_BENCH_CSV: put_csv(&t, b); break;
    case MXD_BENCH_JSON: put_json(&t, b); break;
    }
    return t.len;
}
