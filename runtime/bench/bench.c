/* SPDX-License-Identifier: Apache-2.0 */
/* Start here: the measured repetitions. Each takes every measure once, so that a disturbance meets all of them. */
#include "bench.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../src/costs.h"
#include "../src/machine.h"
#include "bandwidth.h"

const uint32_t mxd_bench_widths[MXD_BENCH_WIDTHS] = {1, 2, 3, 4, 6, 8, 12, MXD_BENCH_WIDEST};

void mxd_bench_add(mxd_bench *b, int measure, double value) {
    mxd_series *s = &b->measures[measure];
    s->values[s->count++] = value;
}

static int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double mxd_bench_median(const double *values, size_t n) {
    double sorted[MXD_BENCH_REPEAT * MXD_BENCH_STEPS];
    memcpy(sorted, values, n * sizeof *values);
    qsort(sorted, n, sizeof *sorted, compare_doubles);
    return (sorted[(n - 1) / 2] + sorted[n / 2]) / 2;
}

void mxd_bench_options_like(const mxd_engine *g, mxd_options *out) {
    mxd_options_default(out);
    out->ctx = g->plan.ctx;
    out->threads = g->plan.threads;
    out->precision = g->plan.precision;
    if (g->mixes) {
        out->core_fraction = g->core_fraction;
        out->catch_up = g->catch_up;
    }
    out->kv = g->kv.mode;
    out->kv_budget = g->kv.budget;
}

mxd_status mxd_bench_generate(mxd_engine *g, mxd_seq *s, const uint32_t *prompt, uint32_t n, mxd_stats *stats,
                              mxd_error *err) {
    mxd_status status = mxd_seq_truncate(s, 0, err);
    if (!status) status = mxd_seq_prompt(s, prompt, n, err);
    while (!status && mxd_seq_stop(s) == MXD_STOP_NONE) status = mxd_step(g, &s, 1, err);
    if (!status) mxd_seq_get_stats(s, stats);
    return status;
}

/* What a benchmark works on. */
typedef struct workbench {
    mxd_engine *engine;
    mxd_seq *seq;
    uint32_t *prompt;
    mxd_bandwidth *bandwidth;
    mxd_batch batch; /* engine NULL: does not fit memory */
} workbench;

static void add_run(mxd_bench *b, const mxd_stats *t) {
    mxd_bench_add(b, PREFILL, t->prefill_tok_per_s);
    mxd_bench_add(b, DECODE, t->decode_tok_per_s);
    mxd_bench_add(b, FIRST_TOKEN, t->first_token_s);
    mxd_bench_add(b, DECODE_READ, 1e-9 * (double)t->bytes_read / t->decode_s);
}

/* Measure steps of 1 to 16 rows after the prompt, in turns. */
static mxd_status time_rows(mxd_bench *b, mxd_engine *g, mxd_error *err) {
    uint32_t ctx = g->plan.ctx, position = b->options.prompt_tokens;
    if (position + MXD_BENCH_WIDEST > ctx) position = ctx > MXD_BENCH_WIDEST ? ctx - MXD_BENCH_WIDEST : 0;
    for (int step = 0; step < MXD_BENCH_STEPS; step++)
        for (int w = 0; w < MXD_BENCH_WIDTHS; w++) {
            uint32_t rows = mxd_bench_widths[w];
            double seconds;
            if (position + rows > ctx || rows > g->max_rows) continue;
            mxd_status status = mxd_time_rows(g, position, rows, mxd_first_pass(g), &seconds, err);
            if (status) return status;
            mxd_bench_add(b, ROWS + w, seconds);
        }
    return MXD_OK;
}

static void watch_heat(mxd_bench *b) {
    double temperature = mxd_temperature();
    if (!isnan(temperature)) mxd_bench_add(b, TEMPERATURE, temperature);
    if (b->flags_before >= 0) b->flags_seen |= mxd_throttle_flags();
}

/* Add what follows from other measures. */
static void derive(mxd_bench *b) {
    uint32_t repeat = b->options.repeat, quarter = (repeat + 3) / 4;
    const double *decode = b->measures[DECODE].values;
    mxd_bench_add(b, DRIFT, mxd_bench_median(decode + repeat - quarter, quarter) / mxd_bench_median(decode, quarter));
    for (uint32_t i = 0; i < repeat; i++)
        mxd_bench_add(b, SHARE, b->measures[DECODE_READ].values[i] / b->measures[BANDWIDTH].values[i]);
    const mxd_series *one_row = &b->measures[ROWS];
    if (!one_row->count) return;
    for (size_t i = 0; i < one_row->count; i++) mxd_bench_add(b, ONE_ROW, one_row->values[i]);
    double one = mxd_bench_median(one_row->values, one_row->count);
    for (int w = 0; w < MXD_BENCH_WIDTHS; w++)
        for (size_t i = 0; i < b->measures[ROWS + w].count; i++) b->measures[ROWS + w].values[i] /= one;
}

static mxd_status repeat(mxd_bench *b, workbench *w, mxd_error *err) {
    const uint32_t n = b->options.prompt_tokens;
    mxd_stats stats;
    mxd_status status = mxd_bench_generate(w->engine, w->seq, w->prompt, n, &stats, err); /* warms up */
    if (status) return status;
    b->peak_rss_bytes = stats.peak_rss_bytes; /* before what only the benchmark needs */
    if ((status = mxd_bandwidth_open(b->threads, &w->bandwidth, err))) return status;
    if ((status = mxd_batch_open(w->engine, w->prompt, &w->batch, err))) {
        mxd_batch_close(&w->batch);
        if (status != MXD_ERR_MEMORY) return status;
    }
    b->flags_before = b->flags_seen = mxd_throttle_flags();
    for (uint32_t i = 0; i < b->options.repeat; i++) {
        if ((status = mxd_bench_generate(w->engine, w->seq, w->prompt, n, &stats, err))) return status;
        add_run(b, &stats);
        mxd_bench_add(b, BANDWIDTH, 1e-9 * mxd_bandwidth_measure(w->bandwidth));
        if ((status = time_rows(b, w->engine, err))) return status;
        if (w->batch.engine && (status = mxd_batch_measure(b, &w->batch, w->prompt[0], err))) return status;
        watch_heat(b);
    }
    b->options.tokens = (uint32_t)stats.generated_tokens; /* less if the context was full */
    b->bytes_per_token = (double)stats.bytes_read / (double)(stats.generated_tokens - 1);
    derive(b);
    return MXD_OK;
}

static mxd_status open_workbench(mxd_engine *g, const mxd_bench_options *o, workbench *w, mxd_error *err) {
    size_t ids = o->prompt_tokens > MXD_BATCH_PROMPT ? o->prompt_tokens : MXD_BATCH_PROMPT;
    mxd_model_info info;
    mxd_model_get_info(g->model, &info);
    mxd_sampling greedy;
    mxd_sampling_default(&greedy);
    greedy.max_tokens = o->tokens;
    greedy.ignore_eos = 1;
    w->engine = g;
    w->prompt = malloc(ids * sizeof *w->prompt);
    if (!w->prompt) return mxd_fail(err, MXD_ERR_MEMORY, "out of memory for the benchmark");
    for (size_t i = 0; i < ids; i++) w->prompt[i] = (uint32_t)(i * 7919 % info.vocab);
    return mxd_seq_open(g, &greedy, &w->seq, err);
}

static void close_workbench(workbench *w) {
    mxd_batch_close(&w->batch);
    mxd_bandwidth_close(&w->bandwidth);
    mxd_seq_close(&w->seq);
    free(w->prompt);
}

static mxd_status check(const mxd_bench_options *o, mxd_error *err) {
    if (o->prompt_tokens < 1 || o->tokens < 2 || o->repeat < 1 || o->repeat > MXD_BENCH_REPEAT)
        return mxd_fail(err, MXD_ERR_ARGUMENT,
                        "a prompt of %u tokens, %u generated, %u repetitions: at least 1, 2 and 1..%d are needed",
                        o->prompt_tokens, o->tokens, o->repeat, MXD_BENCH_REPEAT);
    return mxd_check_reserved("mxd_bench_options", o->reserved, sizeof o->reserved / sizeof *o->reserved, err);
}

static mxd_status allocate(const mxd_engine *g, const mxd_bench_options *o, mxd_bench **out, mxd_error *err) {
    size_t most = (size_t)o->repeat * MXD_BENCH_STEPS;
    mxd_bench *b = calloc(1, sizeof *b);
    double *values = malloc(MEASURES * most * sizeof *values);
    if (!b || !values) {
        free(b);
        free(values);
        return mxd_fail(err, MXD_ERR_MEMORY, "out of memory for %u repetitions", o->repeat);
    }
    b->options = *o;
    b->threads = g->plan.threads;
    b->precision = g->plan.precision;
    b->kernel = g->kernel_names.matmul_mxfp4;
    for (int i = 0; i < MEASURES; i++) b->measures[i].values = values + i * most;
    *out = b;
    return MXD_OK;
}

mxd_status mxd_bench_run(mxd_engine *g, const mxd_bench_options *o, mxd_bench **out, mxd_error *err) {
    *out = NULL;
    workbench w = {0};
    mxd_bench *b = NULL;
    mxd_status status = check(o, err);
    if (!status) status = allocate(g, o, &b, err);
    if (!status) status = open_workbench(g, o, &w, err);
    if (!status) status = repeat(b, &w, err);
    close_workbench(&w);
    if (!status && o->drafts) status = mxd_bench_drafters(b, g, err);
    if (status) mxd_bench_close(&b);
    *out = b;
    return status;
}

void mxd_bench_close(mxd_bench **bench) {
    if (*bench) free((*bench)->measures[0].values);
    free(*bench);
    *bench = NULL;
}
