/* SPDX-License-Identifier: Apache-2.0 */
/* Speculation: who proposes tokens, how likely they are right, and how many of them a step verifies. Nothing here
 * changes what is generated (docs/arithmetic.md, "Sampling"), so all of it may learn while it runs. It is the *compute*
 * consumer of the dynamic origin, whose core tokens are those that get a place in the verify batch:
 *   monitor   tuner.c: what was accepted and what steps took, as observations; draft_log.c: records of drafted tokens
 *   identify  draft_policy.c: a token's chance, from the drafter's confidence and the history of its kind
 *   schedule  draft_policy.c: how many of the likeliest ones, over all sequences, make the most of the step's time
 *   execute   speculate.c: verifies them, and keeps what the target chooses itself
 * Drafters: the caller's; look-up (draft_ngram.c); the bundle's trained one (draft_model.c); at full precision the base
 * plane (draft_base.c). */
#ifndef MXD_DRAFT_H
#define MXD_DRAFT_H

#include <stdint.h>

enum { MXD_MAX_SEQS = 64, MXD_MAX_DRAFT = 15, MXD_DEFAULT_DRAFT = 8 }; /* sequences of a step, drafted tokens of each */

/* Most tokens that a step can commit for a sequence: a first pass accepts all drafted ones and adds one of its own, and
 * under mixed precision a second pass, which verifies no drafts, adds another. */
enum { MXD_MAX_STEP_TOKENS = MXD_MAX_DRAFT + 2 };

/* Kinds of drafted tokens whose share of accepted ones is estimated together. */
enum {
    MXD_KIND_CALLER = 0,  /* + depth, up to 7 */
    MXD_KIND_COPY = 8,    /* + length of the match - 1, up to 15 */
    MXD_KIND_TABLE = 24,  /* + 8 * (order - 1) + eighth of the table's probability; orders 1..2 */
    MXD_KIND_MODEL = 40,  /* + sixteenth of the drafter's confidence */
    MXD_KIND_SECOND = 56, /* its second choice: + eighth of the confidence */
    MXD_KIND_BASE = 64,   /* base precision for full: + depth, up to 7 */
    MXD_KIND_FORCED = 72, /* a grammar leaves no other text */
    MXD_KINDS = 73
};

/* A drafted token. */
typedef struct mxd_node {
    uint32_t token;
    int32_t parent;   /* a node before it, or -1: the newest token of the sequence */
    float confidence; /* probability by whoever proposes it, or the prior of its kind */
    float path;       /* estimated probability that the node and all its ancestors are right */
    uint8_t kind;
    uint8_t record; /* its number among the sequence's mxd_draft_records */
} mxd_node;

/* A tree of tokens that may follow a sequence, parents before children. */
typedef struct mxd_proposal {
    uint32_t count;
    mxd_node node[MXD_MAX_DRAFT];
} mxd_proposal;

/* What drafting took in a pass; whoever drafts adds to it. */
typedef struct mxd_draft_use {
    uint64_t bytes;    /* read, of weights */
    double drafter_s;  /* seconds of the trained drafter's passes */
    double expected_s; /* seconds, by the policy's estimates */
} mxd_draft_use;

#endif
