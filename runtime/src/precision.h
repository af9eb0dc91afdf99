/* SPDX-License-Identifier: Apache-2.0 */
/* The precision consumer. Under `auto`, rows run at base precision. A row that looks doubtful is *core*: it gets a pass
 * at full precision, which also runs all rows that are still at base precision (catch-up). These decisions change what
 * is generated, so they depend on the committed tokens alone: not on drafts, threads or what else is in the step. */
#ifndef MXD_PRECISION_H
#define MXD_PRECISION_H

#include <stdbool.h>

#include "arena.h"
#include "forward.h"

/* What decides whether a row is core, and moves with each row that is decided. */
typedef struct mxd_core_state {
    float threshold; /* score above which a row is core */
    float flip_rate; /* share of the latest looks that changed the choice */
} mxd_core_state;

/* The precision of a sequence's rows. */
typedef struct mxd_precision_state {
    bool mixes;       /* rows run at base precision, core rows also at full; else all at the engine's precision */
    size_t full_done; /* if it mixes: positions below have keys and values of full precision */
    bool awaits_full; /* the row at n_past ran at base precision and is core */
    bool catching_up; /* a pass at full precision had no room for all rows up to the one at n_past */
    uint32_t waited;  /* steps for which that row has waited for a pass at full precision */
    mxd_token_record awaiting; /* what base precision made of it */
    mxd_core_state core;       /* now */
    mxd_core_state *before;    /* (ctx) before the row at each position below `known` was decided */
    size_t known;
    mxd_core_function *core_rule; /* the caller's, or NULL */
    void *core_rule_arg;
} mxd_precision_state;

/* Take what a sequence of the engine needs; empty if the engine does not mix precisions. */
mxd_precision_state mxd_precision_take_seq(const mxd_engine *g, mxd_arena *a);
/* Start the state of an empty sequence. */
void mxd_precision_open(mxd_seq *s, bool mixes);
/* Copy all but the core rule of `from` to `to`, a sequence of the same engine. */
void mxd_precision_copy(mxd_seq *to, const mxd_seq *from);
/* Note that a prompt was queued: the row that waited is one of the prompt's now, and was never decided. */
void mxd_precision_prompt(mxd_seq *s);
/* Go back to the state before the row at n - 1 was decided, since n tokens stay; of these, `processed` have keys and
 * values. Returns how many positions stay processed: rows still at base precision are recomputed. */
size_t mxd_precision_truncate(mxd_seq *s, size_t n, size_t processed);

/* Return the precision (0 base, 1 full) of a row's first pass. */
int mxd_first_pass(const mxd_engine *g);
/* Whether the sequence's next row runs at full precision. */
bool mxd_runs_full(const mxd_seq *s);
/* Return how many rows may still run at base precision before catch-up is due. */
size_t mxd_base_room(const mxd_seq *s);
/* Whether the sequences that wait for full precision get it in this step, whose pass at base precision is done: in
 * small batches, but at once if nobody else runs, and never later than some steps. When they get it changes nothing of
 * what they generate. */
bool mxd_catches_up(mxd_seq *const *seqs, size_t n);
/* Note that the pass has processed all rows below position n. */
void mxd_precision_processed(mxd_seq *s, size_t n);
/* Fill *record from the outcome of the row at n_past. Returns false if the row turns core: it then waits for full
 * precision, and this outcome counts for nothing. */
bool mxd_inspect(mxd_seq *s, const mxd_outcome *outcome, mxd_token_record *record);

/* Return the bytes of weights that a pass of the target reads at a precision, whatever its rows. */
uint64_t mxd_weight_bytes(const mxd_engine *g, int precision);
/* Return the bytes that a token reads on average if this fraction of rows is core. */
double mxd_mixed_bytes(const mxd_engine *g, double core_fraction);

#endif
