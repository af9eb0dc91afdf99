/* SPDX-License-Identifier: Apache-2.0 */
/* The bundle's trained drafter: one layer that reads residual streams of the target (docs/arithmetic.md, "Drafter").
 * Its arithmetic decides which tokens are proposed, never which are generated. */
#ifndef MXD_DRAFT_MODEL_H
#define MXD_DRAFT_MODEL_H

#include "arena.h"
#include "step.h"

/* Tokens of the context that the drafter can choose besides its own vocabulary. */
enum { MXD_CONTEXT_ROWS = 512 };

/* The drafter of an engine. */
typedef struct mxd_drafter {
    bool in_use;           /* if not, the pointers are NULL */
    float *features;       /* (max_rows, features, hidden) residual streams of the target's last pass */
    uint32_t *feature_row; /* (max_rows) which of those rows a row of the drafter reads */
    float *states;         /* (max_rows, hidden) */
    uint8_t *head;         /* (draft vocabulary, hidden) MXINT8T */
    float *logits;         /* (max_seqs, draft vocabulary + MXD_CONTEXT_ROWS) */
} mxd_drafter;

/* A token that the drafter thinks likely, and its probability. */
typedef struct mxd_guess {
    uint32_t token;
    float chance;
} mxd_guess;

/* What the drafter knows of a sequence. */
typedef struct mxd_drafter_state {
    size_t n_past;        /* positions that it has read or skipped */
    size_t skipped;       /* of these: passed while it paused, so its cache has no rows for them */
    float *state;         /* (hidden) after the newest of them */
    mxd_guess guesses[2]; /* of the token after those committed */
    uint32_t guess_count;
    uint32_t *ids;                       /* (draft vocabulary + MXD_CONTEXT_ROWS) tokens that it can choose */
    uint8_t *context_head;               /* (MXD_CONTEXT_ROWS, hidden) MXINT8T, the head rows of those of the context */
    size_t context_read;                 /* tokens that were looked at for the context */
    uint32_t context_rows, context_next; /* rows in use; how many were ever added, as a place modulo MXD_CONTEXT_ROWS */
} mxd_drafter_state;

/* Decide whether an engine, whose option `draft` is resolved, uses the drafter. */
void mxd_draft_model_resolve(mxd_engine *g);
/* Take the memory of an engine, and of each of its sequences. */
void mxd_draft_model_take(mxd_engine *g, mxd_arena *a);
mxd_drafter_state mxd_draft_model_take_seq(const mxd_engine *g, mxd_arena *a);
/* Gather the rows of the draft vocabulary from the target's head. */
void mxd_draft_model_init(mxd_engine *g);

/* Start the state of an empty sequence. */
void mxd_draft_model_open(mxd_seq *s);
/* Copy all but the cache (mxd_kv_copy) from `from` to `to`, a sequence of the same engine. */
void mxd_draft_model_copy(mxd_seq *to, const mxd_seq *from);
/* Forget the guesses, since other tokens follow, and what was read from position n on. */
void mxd_draft_model_truncate(mxd_seq *s, size_t n);

/* Fill the empty proposals of n sequences: a likeliest chain of up to most[i] tokens and the runners-up of its tokens,
 * as deep as it may pay in a step of `rows` rows that make a token each. */
void mxd_draft_model_propose(mxd_engine *g, mxd_seq *const *seqs, const size_t *most, size_t n, size_t rows,
                             mxd_draft_use *use);
/* Read what the pass of the target made of positions that are processed now and that the drafter has not read, and make
 * the first guesses of the next draft. */
void mxd_draft_model_follow(mxd_pass *pass);

/* Measure the seconds of a pass with one row for each of so many sequences. */
double mxd_draft_model_time(mxd_engine *g, uint32_t rows);

#endif
