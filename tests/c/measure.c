/* SPDX-License-Identifier: Apache-2.0 */
/* Measures what steps cost for an engine of several sequences, copies one and steps all, on two threads (built with
 * ThreadSanitizer):
 *   measure BUNDLE */
#include <stdio.h>
#include <stdlib.h>

#include "mxdraft.h"

static void check(mxd_status status, const mxd_error *err) {
    if (!status) return;
    fprintf(stderr, "%s\n", err->message);
    exit(1);
}

int main(int argc, char **argv) {
    mxd_error err;
    mxd_model *model;
    mxd_engine *engine;
    mxd_options options;
    mxd_sampling sampling;
    mxd_seq *seqs[3];
    const uint32_t prompt[] = {5, 6, 7, 8, 5, 6};
    if (argc != 2) return 2;
    mxd_options_default(&options);
    options.ctx = 64;
    options.threads = 2;
    options.max_seqs = 3;
    mxd_sampling_default(&sampling);
    sampling.ignore_eos = 1;
    check(mxd_model_open(argv[1], &model, &err), &err);
    check(mxd_engine_open(model, &options, &engine, &err), &err);
    check(mxd_engine_measure_costs(engine, NULL, &err), &err);
    for (int i = 0; i < 2; i++) {
        check(mxd_seq_open(engine, &sampling, &seqs[i], &err), &err);
        check(mxd_seq_prompt(seqs[i], prompt + i, 4, &err), &err);
    }
    for (int i = 0; i < 10; i++) check(mxd_step(engine, seqs, 2, &err), &err);
    check(mxd_seq_copy(seqs[0], &sampling, &seqs[2], &err), &err);
    for (int i = 0; i < 10; i++) check(mxd_step(engine, seqs, 3, &err), &err);
    for (int i = 0; i < 3; i++) mxd_seq_close(&seqs[i]);
    mxd_engine_close(&engine);
    mxd_model_close(&model);
    puts("done");
    return 0;
}
