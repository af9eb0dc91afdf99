/* SPDX-License-Identifier: Apache-2.0 */
/* Two engines that share a tuner, each on a thread of its own, with several sequences that draft by look-up:
 *   tuner_engines BUNDLE    prints tokens, how many were drafted, and how many differ from plain decoding
 * One of them closes, and another one takes its place, while the other runs on. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "mxdraft.h"

enum { SEQUENCES = 3, TOKENS = 16, ROUNDS = 3 };

static mxd_model *model;
static uint32_t expected[SEQUENCES][TOKENS];
static unsigned long drafted[2], different[2];

static void check(mxd_status status, const mxd_error *e) {
    if (!status) return;
    fprintf(stderr, "%s\n", e->message);
    exit(1);
}

static mxd_engine *open_engine(mxd_draft draft) {
    mxd_error e;
    mxd_engine *g;
    mxd_options o;
    mxd_options_default(&o);
    o.ctx = 64;
    o.max_seqs = SEQUENCES;
    o.threads = 2;
    o.precision = MXD_PRECISION_BASE;
    o.draft = draft;
    check(mxd_engine_open(model, &o, &g, &e), &e);
    return g;
}

/* Let every sequence write to its end; out gets what they wrote. Returns how much was drafted. */
static unsigned long generate(mxd_engine *g, uint32_t out[SEQUENCES][TOKENS]) {
    mxd_error e;
    mxd_seq *seqs[SEQUENCES];
    unsigned long count = 0;
    for (uint32_t i = 0; i < SEQUENCES; i++) {
        mxd_sampling p;
        mxd_sampling_default(&p);
        p.max_tokens = TOKENS;
        p.ignore_eos = 1;
        uint32_t prompt[6] = {5 + i, 9, 11, 5 + i, 9, 11};
        check(mxd_seq_open(g, &p, &seqs[i], &e), &e);
        check(mxd_seq_prompt(seqs[i], prompt, 6, &e), &e);
    }
    for (int running = 1; running;) {
        check(mxd_step(g, seqs, SEQUENCES, &e), &e);
        running = 0;
        for (int i = 0; i < SEQUENCES; i++) running |= mxd_seq_stop(seqs[i]) == MXD_STOP_NONE;
    }
    for (int i = 0; i < SEQUENCES; i++) {
        size_t n;
        mxd_stats stats;
        const uint32_t *tokens = mxd_seq_tokens(seqs[i], &n);
        for (int k = 0; k < TOKENS; k++) out[i][k] = tokens[n - TOKENS + (size_t)k];
        mxd_seq_get_stats(seqs[i], &stats);
        count += stats.drafted;
        mxd_seq_close(&seqs[i]);
    }
    return count;
}

static mxd_engine *engines[2];

static void *engine_main(void *arg) {
    size_t number = (size_t)arg;
    uint32_t made[SEQUENCES][TOKENS];
    mxd_error e;
    mxd_costs costs = {.step = {0}};
    for (int r = 1; r <= 16; r++) costs.step[r] = 1 + 0.001 * r;
    for (int round = 0; round < ROUNDS; round++) {
        mxd_engine_set_costs(engines[number], &costs);
        drafted[number] += generate(engines[number], made);
        for (int i = 0; i < SEQUENCES; i++)
            for (int k = 0; k < TOKENS; k++) different[number] += made[i][k] != expected[i][k];
        if (number == 0) continue;
        mxd_engine_close(&engines[number]);
        engines[number] = open_engine(MXD_DRAFT_NGRAM);
        check(mxd_engine_share_tuner(engines[number], engines[0], &e), &e);
    }
    if (number == 1) mxd_engine_close(&engines[1]);
    return NULL;
}

int main(int argc, char **argv) {
    mxd_error e;
    pthread_t threads[2];
    if (argc != 2) return 2;
    check(mxd_model_open(argv[1], &model, &e), &e);
    mxd_engine *plain = open_engine(MXD_DRAFT_OFF);
    generate(plain, expected);
    mxd_engine_close(&plain);
    for (size_t i = 0; i < 2; i++) engines[i] = open_engine(MXD_DRAFT_NGRAM);
    check(mxd_engine_share_tuner(engines[1], engines[0], &e), &e);
    for (size_t i = 0; i < 2; i++) pthread_create(&threads[i], NULL, engine_main, (void *)i);
    for (size_t i = 0; i < 2; i++) pthread_join(threads[i], NULL);
    mxd_engine_close(&engines[0]);
    mxd_model_close(&model);
    printf("drafted %d %d different %lu\n", drafted[0] > 20, drafted[1] > 20, different[0] + different[1]);
    return 0;
}
