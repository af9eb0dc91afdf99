/* Private: the trained drafter of the bundle. */
#ifndef MXD_DRAFT_MODEL_H
#define MXD_DRAFT_MODEL_H

#include "internal.h"

/* Gather the rows of the draft vocabulary from the target's head. */
void mxd_draft_model_init(mxd_engine *g);

/* What the drafter knows of a sequence, but for its cache (mxd_kv_copy), into another one of the engine. */
void mxd_draft_model_copy(mxd_seq *to, const mxd_seq *from);

/* Behind a step of the target: sequence i's newly processed positions were the step's rows step_rows[i][counts[i]].
 * Brings the drafter's cache up to date and makes the first guesses of the next draft. */
void mxd_draft_model_follow(mxd_engine *g, mxd_seq *const *seqs, const uint32_t *const *step_rows, const size_t *counts,
                            size_t n);

/* Fill the (empty) proposals of n sequences with a likeliest chain of up to most[i] tokens and the runners-up beside
 * it, as deep as it may pay in a step of `rows` rows that make a token each. */
void mxd_draft_model_propose(mxd_engine *g, mxd_seq *const *seqs, const size_t *most, size_t n, size_t rows);

/* Seconds of one pass of a row each of so many sequences. */
double mxd_draft_model_time(mxd_engine *g, uint32_t rows);

#endif
