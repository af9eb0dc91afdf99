/* SPDX-License-Identifier: Apache-2.0 */
/* The policy of speculation: how likely drafted tokens are right, what steps cost, and how many drafted tokens a step
 * should verify. All of it is learned from observations (tuner.h). */
#ifndef MXD_DRAFT_POLICY_H
#define MXD_DRAFT_POLICY_H

#include <stdbool.h>

#include "draft.h"
#include "identify.h"
#include "status.h"

/* Rows of the steps in mxd_costs: 1 to MXD_COST_ROWS in .step, these in .wide. */
enum { MXD_COST_ROWS = 16 };
#define MXD_WIDE_ROWS 24, 32, 48, 64

typedef enum mxd_observation_type { MXD_OBSERVED_DRAFT, MXD_OBSERVED_CHOICE, MXD_OBSERVED_STEP } mxd_observation_type;

/* What became of a step's proposals. */
typedef enum mxd_choice {
    MXD_NOTHING_PROPOSED,
    MXD_SOME_PAID,
    MXD_NONE_PAID,
    MXD_TRIED /* none paid, but one is verified all the same: the text may have become predictable */
} mxd_choice;

/* What a step tells the policy. */
typedef struct mxd_observation {
    double seconds;         /* a step: all it took, drafting included */
    float drafter_s;        /* of these: passes of the trained drafter */
    float drafting_s;       /* of these: drafting, the trained drafter's passes among it */
    float drafter_gain;     /* share of the time of verifying that the trained drafter's tokens were expected to save */
    float promised;         /* drafted tokens that the estimates said would be right */
    uint16_t rows, tokens;  /* verified; made */
    uint16_t kept;          /* drafted tokens that were right */
    uint8_t type;           /* mxd_observation_type */
    uint8_t kind, accepted; /* a drafted token whose parent was right: whether it was too */
    uint8_t verified : 1;   /* it had a place in the step */
    uint8_t choice : 4;     /* mxd_choice */
    uint8_t together : 1;   /* several sequences */
    uint8_t asked_model : 1; /* the trained drafter had guesses to verify or to deepen */
} mxd_observation;

/* Everything that is learned. Steps read a snapshot that no one changes (tuner.h). */
typedef struct mxd_policy {
    mxd_weights weights; /* of confidence and history, both as log-odds */
    mxd_costs costs;     /* corrected by what steps take compared with one of one row */
    bool measured;       /* the costs are this machine's */
    struct {
        float accepted, tried;
    } kind[MXD_KINDS];
    float chance[MXD_KINDS]; /* that a token of the kind is right if its parent is, at the confidence of its prior */
    struct {
        float promised, kept; /* as in mxd_observation; older steps fade */
    } drafts[2];              /* of one sequence alone; of several together */
    uint32_t idle, patience;  /* steps in a row that verified nothing of what was proposed; how many until one tries */
    double measured_step[MXD_COST_ROWS + 1]; /* costs.step as measured, without any drafting */
    double pace;                             /* seconds of a step of one row, lately, over those measured */
    uint32_t plain, drafted;                 /* steps of one row so far; steps of more since the last of them */
    struct {
        double saved;          /* seconds that the steps with the trained drafter saved, since it last was judged */
        uint32_t steps, pause; /* how many these are; steps for which the drafter still pauses */
    } model[2];                /* of one sequence alone; of several together */
} mxd_policy;

void mxd_policy_init(mxd_policy *p, const mxd_weights *weights);
void mxd_policy_set_costs(mxd_policy *p, const mxd_costs *costs);
void mxd_policy_learn(mxd_policy *p, const mxd_observation *o);

/* Return the first guess of how often a kind is accepted; the share that was, lately. */
float mxd_policy_prior(uint8_t kind);
float mxd_policy_history(const mxd_policy *p, uint8_t kind);
/* Append a node to a proposal, with its estimated chance, and return its index; `parent` as in mxd_node. */
uint32_t mxd_propose(const mxd_policy *p, mxd_proposal *out, uint32_t token, int32_t parent, uint8_t kind,
                     float confidence);

/* Return the share of the drafted tokens expected to be right that were, lately, of one sequence alone or of several.
 * Estimates choose the best of many drafts, so they promise too much. */
float mxd_policy_credit(const mxd_policy *p, bool together);
/* Return the seconds of a step of so many rows. */
double mxd_policy_step_cost(const mxd_policy *p, size_t rows);
/* Return the seconds of a step of so many rows that drafts for full precision at base precision, or of the trained
 * drafter. */
double mxd_policy_base_cost(const mxd_policy *p, size_t rows);
double mxd_policy_model_cost(const mxd_policy *p, size_t rows);
/* Return the expected seconds saved by extending the draft below a node with probability `path`, in a step of `rows`
 * rows that make a token each; without the cost of the draft step that all such nodes share,
 * mxd_policy_draft_cost(). */
double mxd_policy_deeper_gain(const mxd_policy *p, float path, size_t rows);
double mxd_policy_draft_cost(const mxd_policy *p);
/* Return how many tokens base precision should draft for full precision, up to `most`: 0 if the proposal as it is
 * yields more tokens a second. */
uint32_t mxd_policy_base_length(const mxd_policy *p, mxd_proposal *d, size_t most);
/* Whether the trained drafter should guess for n sequences: not while it pauses after steps that took longer with it
 * than without, nor, for several, if no guess could get a place. */
bool mxd_policy_asks_model(const mxd_policy *p, size_t n);
/* Cut the proposals of n sequences down to what one step should verify besides `rows` rows that make a token each, at
 * most `room` nodes. Each proposal keeps at least `least` nodes as far as room goes. Rows of prompts do not count: they
 * make a step longer, not a drafted token worth more. Notes in *o the choice, and what the trained drafter's part in it
 * is worth. */
void mxd_policy_choose(const mxd_policy *p, mxd_proposal *const *proposals, size_t n, size_t rows, size_t room,
                       uint32_t least, mxd_observation *o);

#endif
