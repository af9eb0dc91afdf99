/* SPDX-License-Identifier: Apache-2.0 */
/* Answers to a few questions with each drafter, in turns with plain decoding. */
#include "bench.h"

#include <string.h>

static const mxd_draft DRAFTERS[MXD_BENCH_DRAFTERS] = {MXD_DRAFT_OFF, MXD_DRAFT_NGRAM, MXD_DRAFT_MODEL, MXD_DRAFT_AUTO};

static const char *const QUESTIONS[] = {
    "Tell me about the life of bees in a garden.",
    "Write a Python function that counts how often each word occurs in a text, and explain it.",
    "List five ways to save water at home, with one sentence about each.",
    "Correct the spelling and repeat: The ferst ship came in the morning. The secand ship came in the evning.",
};
enum { QUESTION_COUNT = sizeof QUESTIONS / sizeof *QUESTIONS, MAX_QUESTION = 256 };

/* Encode a question through the chat template, or as it is if the bundle has none. */
static mxd_status encode(const mxd_model *m, const char *text, uint32_t *ids, size_t *n, mxd_error *err) {
    const mxd_message message = {"user", text};
    mxd_status status = mxd_chat_encode(m, &message, 1, 1, ids, MAX_QUESTION, n, err);
    if (status != MXD_ERR_UNSUPPORTED) return status;
    return mxd_encode(m, text, strlen(text), ids, MAX_QUESTION, n, err);
}

/* Measure one answer with a drafter; `off` gets the speed of plain decoding, whose turn comes first. */
static mxd_status time_answer(mxd_bench *b, mxd_engine *g, int drafter, const uint32_t *ids, size_t n, double *off,
                              mxd_error *err) {
    mxd_sampling greedy;
    mxd_sampling_default(&greedy);
    greedy.max_tokens = b->options.tokens;
    mxd_seq *s;
    mxd_stats stats = {0};
    mxd_status status = mxd_seq_open(g, &greedy, &s, err);
    if (status) return status;
    status = mxd_bench_generate(g, s, ids, (uint32_t)n, &stats, err);
    mxd_seq_close(&s);
    if (status || stats.generated_tokens < 2) return status;
    if (drafter == 0) *off = stats.decode_tok_per_s;
    mxd_bench_add(b, DRAFT_SPEED + drafter, stats.decode_tok_per_s);
    mxd_bench_add(b, DRAFT_GAIN + drafter, stats.decode_tok_per_s / *off);
    mxd_bench_add(b, DRAFT_TAU + drafter, stats.tokens_per_step);
    return MXD_OK;
}

static mxd_status open_engine(const mxd_engine *g, mxd_draft drafter, mxd_engine **out, mxd_error *err) {
    mxd_options options;
    mxd_bench_options_like(g, &options);
    options.draft = drafter;
    mxd_status status = mxd_engine_open(g->model, &options, out, err);
    if (!status && drafter != MXD_DRAFT_OFF) status = mxd_engine_measure_costs(*out, NULL, err);
    return status;
}

mxd_status mxd_bench_drafters(mxd_bench *b, const mxd_engine *g, mxd_error *err) {
    mxd_engine *engines[MXD_BENCH_DRAFTERS] = {NULL};
    mxd_status status = MXD_OK;
    for (int d = 0; d < MXD_BENCH_DRAFTERS && !status; d++)
        if (d == 0 || b->options.drafts & 1u << DRAFTERS[d]) status = open_engine(g, DRAFTERS[d], &engines[d], err);
    for (uint32_t i = 0; i < b->options.repeat && !status; i++)
        for (int q = 0; q < QUESTION_COUNT && !status; q++) {
            uint32_t ids[MAX_QUESTION];
            size_t n;
            double off = 0;
            status = encode(g->model, QUESTIONS[q], ids, &n, err);
            for (int d = 0; d < MXD_BENCH_DRAFTERS && !status; d++)
                if (engines[d]) status = time_answer(b, engines[d], d, ids, n, &off, err);
        }
    for (int d = 0; d < MXD_BENCH_DRAFTERS; d++) mxd_engine_close(&engines[d]);
    return status;
}
