/* Speculation: who proposes tokens, how likely they are right, and how many of them a step verifies. Nothing here
 * changes what is generated (docs/arithmetic.md, "Sampling"), so all of it may learn while it runs. It is the *compute*
 * consumer of the dynamic origin, whose core tokens are those that get a place in the verify batch:
 *   monitor   tuner.h: what was accepted and what steps took, as observations; monitor.c: records of drafted tokens
 *   identify  identify.h: a token's chance from the drafter's confidence and the history of its kind (mxd_propose)
 *   schedule  schedule_compute.c: how many of the likeliest ones, over all sequences, make the most of the step's time
 *   execute   step.c: verifies them, and keeps what the target chooses itself */
#ifndef MXD_DRAFT_H
#define MXD_DRAFT_H

#include "identify.h"
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
    uint8_t record[MXD_MAX_DRAFT]; /* its number among the sequence's mxd_draft_records */
    float confidence[MXD_MAX_DRAFT]; /* probability by whoever proposes it, or the prior of its kind */
    float path[MXD_MAX_DRAFT];     /* estimated probability that the node and all above it are right */
} mxd_proposal;

/* ---- schedule_compute.c: what pays ---- */

/* What steps tell the policy. */
typedef enum mxd_seen { MXD_SEEN_DRAFT, MXD_SEEN_CHOICE, MXD_SEEN_STEP } mxd_seen;

/* What became of a step's proposals. */
typedef enum mxd_choice {
    MXD_NOTHING_PROPOSED,
    MXD_SOME_PAID,
    MXD_NONE_PAID,
    MXD_TRIED /* none paid, but one is verified all the same: the text may have become predictable */
} mxd_choice;

typedef struct mxd_observation {
    double seconds;          /* a step: all it took, drafting included */
    float drafter_s;         /* of these: passes of the trained drafter */
    float drafter_gain;      /* share of the time of verifying that its tokens were expected to save */
    uint16_t rows, tokens;   /* verified; made */
    uint8_t seen;            /* mxd_seen */
    uint8_t kind, accepted;  /* a drafted token whose parent was right: whether it was too */
    uint8_t verified : 1;    /* it had a place in the step */
    uint8_t choice : 4;      /* mxd_choice */
    uint8_t together : 1;    /* several sequences */
    uint8_t asked_model : 1; /* the trained drafter had guesses to verify or to deepen */
} mxd_observation;

/* Everything that is learned. Steps read a snapshot that no one changes (tuner.h). */
typedef struct mxd_policy {
    mxd_weights weights; /* of confidence and history, both as log-odds */
    mxd_costs costs; /* corrected by what steps take beside one of one row */
    int measured;    /* the costs are this machine's */
    struct {
        float accepted, tried;
    } kind[MXD_KINDS];
    float chance[MXD_KINDS]; /* of a token of the kind whose confidence is the kind's prior */
    uint32_t idle, patience; /* steps in a row that verified nothing of what was proposed; how many until one tries */
    double measured_step[17]; /* the costs of steps as they were measured, without any drafting */
    double pace;             /* seconds of a step of one row, lately, by those measured */
    struct {
        double saved;          /* seconds that a step with the trained drafter saves, lately */
        uint32_t steps, pause; /* steps that this is of; steps for which the drafter still pauses */
    } model[2];              /* of one sequence alone; of several together */
} mxd_policy;

void mxd_policy_init(mxd_policy *p, const mxd_weights *weights);
void mxd_policy_set_costs(mxd_policy *p, const mxd_costs *costs);
void mxd_policy_learn(mxd_policy *p, const mxd_observation *o);
/* Seconds of a step of so many rows. */
double mxd_policy_step_cost(const mxd_policy *p, size_t rows);
/* First guess of how often a kind is accepted, and the share that was, lately. */
float mxd_policy_prior(uint8_t kind);
float mxd_policy_history(const mxd_policy *p, uint8_t kind);
/* Estimated probability that a token of this kind is right if its parent is. */
float mxd_policy_chance(const mxd_policy *p, uint8_t kind);
/* Seconds that a draft step behind a node of this path may save in a step of so many rows that make a token each, before
 * the time of the draft step that all share, mxd_policy_draft_cost(). */
double mxd_policy_deeper_gain(const mxd_policy *p, float path, size_t rows);
double mxd_policy_draft_cost(const mxd_policy *p);
/* How many tokens base precision should draft for full precision, up to `most`: 0 if the proposal as it is yields more
 * tokens a second. */
uint32_t mxd_policy_base_length(const mxd_policy *p, mxd_proposal *d, size_t most);
/* Whether the trained drafter should guess for n sequences: not while it pauses after steps that took longer with it
 * than without (it leaves the sequences that run), nor, for several, if no guess could get a place. */
int mxd_policy_asks_model(const mxd_policy *p, size_t n);
/* Append a node to a proposal and return its index; parent as in mxd_proposal. */
uint32_t mxd_propose(const mxd_policy *p, mxd_proposal *out, uint32_t token, int32_t parent, uint8_t kind,
                     float confidence);
/* Cut the proposals of n sequences down to what one step should verify beside `rows` rows that make a token each, at
 * most `room` nodes; whoever proposes something keeps at least `least` nodes as far as room goes. Rows of prompts do not
 * count: they make a step longer, not a drafted token worth more. Notes the choice, and what the trained drafter's part
 * in it is worth, in *o. */
void mxd_policy_choose(const mxd_policy *p, mxd_proposal *const *proposals, size_t n, size_t rows, size_t room,
                       uint32_t least, mxd_observation *o);

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
