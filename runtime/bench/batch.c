/* SPDX-License-Identifier: Apache-2.0 */
/* Steps of many short sequences, compared with steps of one. */
#include "../src/clock.h"
#include "bench.h"

void mxd_batch_close(mxd_batch *batch) {
    for (int i = 0; i < MXD_BATCH; i++) mxd_seq_close(&batch->seqs[i]);
    mxd_engine_close(&batch->engine);
}

mxd_status mxd_batch_open(const mxd_engine *g, const uint32_t *ids, mxd_batch *out, mxd_error *err) {
    mxd_options options;
    mxd_bench_options_like(g, &options);
    options.ctx = MXD_BATCH_PROMPT + 1;
    options.max_seqs = MXD_BATCH;
    options.kv_budget = 0; /* that of g is for its context */
    mxd_sampling one;
    mxd_sampling_default(&one);
    one.max_tokens = 1;
    mxd_status status = mxd_engine_open(g->model, &options, &out->engine, err);
    for (int i = 0; i < MXD_BATCH && !status; i++) {
        status = mxd_seq_open(out->engine, &one, &out->seqs[i], err);
        if (!status) status = mxd_seq_prompt(out->seqs[i], ids, MXD_BATCH_PROMPT, err);
    }
    /* Each stops after its first token; when the last one has, there is nothing left to run. */
    while (!status && mxd_seq_stop(out->seqs[MXD_BATCH - 1]) == MXD_STOP_NONE)
        status = mxd_step(out->engine, out->seqs, MXD_BATCH, err);
    return status;
}

/* Measure one step in which each of the first n sequences decodes a token. */
static mxd_status time_step(mxd_batch *batch, size_t n, uint32_t id, double *seconds, mxd_error *err) {
    mxd_status status = MXD_OK;
    for (size_t i = 0; i < n && !status; i++) {
        status = mxd_seq_truncate(batch->seqs[i], MXD_BATCH_PROMPT - 1, err);
        if (!status) status = mxd_seq_prompt(batch->seqs[i], &id, 1, err);
    }
    double start = mxd_now();
    if (!status) status = mxd_step(batch->engine, batch->seqs, n, err);
    *seconds = mxd_now() - start;
    return status;
}

mxd_status mxd_batch_measure(mxd_bench *b, mxd_batch *batch, uint32_t id, mxd_error *err) {
    double one[MXD_BENCH_STEPS], all[MXD_BENCH_STEPS];
    for (int step = 0; step < MXD_BENCH_STEPS; step++) {
        mxd_status status = time_step(batch, 1, id, &one[step], err);
        if (!status) status = time_step(batch, MXD_BATCH, id, &all[step], err);
        if (status) return status;
    }
    double together = mxd_bench_median(all, MXD_BENCH_STEPS);
    mxd_bench_add(b, BATCH_COST, together / mxd_bench_median(one, MXD_BENCH_STEPS));
    mxd_bench_add(b, BATCH_SPEED, MXD_BATCH / together);
    return MXD_OK;
}
