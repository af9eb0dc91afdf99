/* Speculation: who proposes tokens, how likely they are right, and how many of them a step verifies. Nothing here
 * changes what is generated (docs/arithmetic.md, "Sampling"), so all of it may learn while it runs. */
#ifndef MXD_DRAFT_H
#define MXD_DRAFT_H

#include "status.h"

enum { MXD_MAX_DRAFT = 15, MXD_DEFAULT_DRAFT = 8 };

/* Kinds of drafted tokens whose share of accepted ones is estimated together. */
enum {
    MXD_KIND_CALLER = 0, /* + depth, up to 7 */
    MXD_KIND_COPY = 8,   /* + length of the match - 1, up to 15 */
    MXD_KIND_TABLE = 24, /* + 8 * (order - 1) + eighth of the table's probability; orders 1..2 */
    MXD_KIND_MODEL = 40, /* + sixteenth of the drafter's confidence */
    MXD_KIND_SECOND = 56, /* its second choice: + eighth of the confidence */
    MXD_KIND_BASE = 64,  /* base precision for full: + depth, up to 7 */
    MXD_KINDS = 72
};

/* A tree of tokens that may follow a sequence, parents before children. */
typedef struct mxd_proposal {
    uint32_t count;
    uint32_t token[MXD_MAX_DRAFT];
    int32_t parent[MXD_MAX_DRAFT]; /* a node before it, or -1: the newest token of the sequence */
    uint8_t kind[MXD_MAX_DRAFT];
    float path[MXD_MAX_DRAFT];     /* estimated probability that the node and all above it are right */
} mxd_proposal;

/* ---- policy.c: what pays ---- */

typedef struct mxd_policy {
    mxd_costs costs; /* corrected by what steps take beside one of one row */
    int measured;    /* the costs are this machine's */
    struct {
        float accepted, tried;
    } kind[MXD_KINDS];
    uint32_t idle, patience; /* steps in a row that verified nothing of what was proposed; how many until one tries */
    double measured_step[17]; /* the costs of steps as they were measured, without any drafting */
    double pace;             /* seconds of a step of one row, lately, by those measured */
    double saved;            /* seconds that a step with the trained drafter saves, lately */
    uint32_t model_steps, model_pause; /* steps that this is of; steps for which the drafter still pauses */
} mxd_policy;

void mxd_policy_init(mxd_policy *p);
void mxd_policy_set_costs(mxd_policy *p, const mxd_costs *costs);
/* Seconds of a step of so many rows. */
double mxd_policy_step_cost(const mxd_policy *p, size_t rows);
/* Estimated probability that a token of this kind is right if its parent is. */
float mxd_policy_chance(const mxd_policy *p, uint8_t kind);
void mxd_policy_learn(mxd_policy *p, uint8_t kind, int accepted);
/* Whether a draft step behind a node of this path may pay, in a step of so many rows. */
int mxd_policy_deepens(const mxd_policy *p, float path, size_t rows);
/* How many tokens base precision should draft for full precision, up to `most`: 0 if the proposal as it is yields more
 * tokens a second. */
uint32_t mxd_policy_base_length(const mxd_policy *p, const mxd_proposal *d, size_t most);
/* What a decode step of one sequence really took, drafting included, and how many tokens it made. `model`: whether the
 * trained drafter was asked. */
void mxd_policy_observe(mxd_policy *p, size_t rows, double seconds, size_t tokens, int model);
/* Whether the trained drafter should guess: after its steps took longer than plain ones would have, it leaves the
 * sequences that run, and pauses for a while. */
int mxd_policy_asks_model(const mxd_policy *p);
/* Append a node to a proposal and return its index; parent as in mxd_proposal. */
uint32_t mxd_propose(const mxd_policy *p, mxd_proposal *out, uint32_t token, int32_t parent, uint8_t kind);
/* Cut the proposals of n sequences down to what one step should verify beside `rows` rows that run anyway, at most
 * `room` nodes; whoever proposes something keeps at least `least` nodes as far as room goes. */
void mxd_policy_choose(mxd_policy *p, mxd_proposal *const *proposals, size_t n, size_t rows, size_t room,
                       uint32_t least);

/* ---- ngram.c: look-up ---- */

/* The bundle's table of what follows one or two tokens (runtime/BUNDLE.md, draft.ngrams), read in place. */
typedef struct mxd_ngram_table {
    uint32_t count[2];           /* entries by order - 1 */
    const uint32_t *context[2];  /* (count, order) tokens, ascending */
    const uint32_t *next[2];     /* (count) the likeliest token behind them */
    const uint8_t *chance[2];    /* (count) its probability in 1/256 */
} mxd_ngram_table;

/* Validate section[len] for a vocabulary: MXD_BAD_DRAFT. */
mxd_status mxd_ngram_table_init(mxd_ngram_table *t, const uint8_t *section, size_t len, uint32_t vocab, mxd_error *err);
/* Propose a chain of up to `most` tokens behind ids[n]: what followed the longest earlier occurrence of its end, or
 * what the table (NULL: none) knows, whichever is likelier right. */
void mxd_ngram_propose(const mxd_ngram_table *t, const mxd_policy *p, const uint32_t *ids, size_t n, size_t most,
                       mxd_proposal *out);

#endif
