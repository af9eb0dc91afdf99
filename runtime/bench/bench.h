/* SPDX-License-Identifier: Apache-2.0 */
/* The benchmark: what it measures, and its results.
 *
 *   bench.c      start here: one engine, repetition by repetition, and what follows from the measures
 *   batch.c      steps of many sequences
 *   drafters.c   answers to questions, drafter by drafter
 *   bandwidth.c  how fast memory is read
 *   report.c     the results as text
 *
 * It uses the public functions, as any caller would, except for three things that they do not tell: the settings of the
 * engine that other engines are to be like (mxd_bench_options_like), the seconds of a step of several rows
 * (mxd_time_rows), and the name of the matrix kernel. */
#ifndef MXD_BENCH_H
#define MXD_BENCH_H

#include "../src/internal.h"

/* Most repetitions, and steps of each kind in one; sequences of a batch, and the length of their prompts. */
enum { MXD_BENCH_REPEAT = 1000, MXD_BENCH_STEPS = 5, MXD_BATCH = 48, MXD_BATCH_PROMPT = 16 };

/* Rows of one sequence in a step, as verifying drafts takes them. */
enum { MXD_BENCH_WIDTHS = 8, MXD_BENCH_WIDEST = 16 };
extern const uint32_t mxd_bench_widths[MXD_BENCH_WIDTHS];

/* The drafters that are compared, in the order of their measures; plain decoding first. */
enum { MXD_BENCH_DRAFTERS = 4 };

enum {
    PREFILL,
    DECODE,
    DRIFT,
    FIRST_TOKEN,
    DECODE_READ,
    BANDWIDTH,
    SHARE,
    ONE_ROW,
    ROWS, /* one for each width */
    BATCH_COST = ROWS + MXD_BENCH_WIDTHS,
    BATCH_SPEED,
    TEMPERATURE,
    DRAFT_SPEED, /* one for each drafter */
    DRAFT_GAIN = DRAFT_SPEED + MXD_BENCH_DRAFTERS,
    DRAFT_TAU = DRAFT_GAIN + MXD_BENCH_DRAFTERS,
    MEASURES = DRAFT_TAU + MXD_BENCH_DRAFTERS
};

typedef struct mxd_series {
    double *values; /* (count) in the order measured */
    size_t count;   /* 0: not measured */
} mxd_series;

struct mxd_bench {
    mxd_bench_options options;
    uint32_t threads, precision;
    const char *kernel;
    mxd_series measures[MEASURES];
    double bytes_per_token;
    uint64_t peak_rss_bytes;
    int64_t flags_before, flags_seen; /* throttling, at the start and at any time since; -1: unknown */
};

/* ---- bench.c ---- */

void mxd_bench_add(mxd_bench *b, int measure, double value);
/* Return the median of values[n], n at most MXD_BENCH_REPEAT * MXD_BENCH_STEPS. */
double mxd_bench_median(const double *values, size_t n);
/* Fill in the options of an engine like g, but with the default drafters. */
void mxd_bench_options_like(const mxd_engine *g, mxd_options *out);
/* Run prefill and decode in the sequence s, from nothing to its stop. */
mxd_status mxd_bench_generate(mxd_engine *g, mxd_seq *s, const uint32_t *prompt, uint32_t n, mxd_stats *stats,
                              mxd_error *err);

/* ---- batch.c ---- */

/* Short sequences in an engine of their own. */
typedef struct mxd_batch {
    mxd_engine *engine;
    mxd_seq *seqs[MXD_BATCH];
} mxd_batch;

/* Open a batch in an engine like g and process the prompt of each sequence, the first MXD_BATCH_PROMPT of ids. Close it
 * after a failure, too. */
mxd_status mxd_batch_open(const mxd_engine *g, const uint32_t *ids, mxd_batch *out, mxd_error *err);
void mxd_batch_close(mxd_batch *batch);
/* Measure steps in which all sequences decode the token `id`, in turns with steps of one sequence. */
mxd_status mxd_batch_measure(mxd_bench *b, mxd_batch *batch, uint32_t id, mxd_error *err);

/* ---- drafters.c ---- */

/* Answer the questions with plain decoding and every drafter that the options name, in turns. */
mxd_status mxd_bench_drafters(mxd_bench *b, const mxd_engine *g, mxd_error *err);

#endif
