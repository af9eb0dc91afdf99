/* SPDX-License-Identifier: Apache-2.0 */
/* The tuner: what steps show, and the policy learned from it, which engines on several threads may share. No step ever
 * waits for another.
 *
 * The policy lives in snapshots that nobody changes once they are published. A step reads the current one from begin to
 * end. What it observes goes to a ring of its reader. Whoever ends a step and gets the writer's flag (one try) folds
 * the rings of all into a new snapshot. An old snapshot is used again only when every reader has passed a step boundary
 * since it was replaced, so none can still read it: each publishes, at the beginning of its step, the number of
 * publications that it has seen, and at the end that it reads none. While no snapshot is free, observations wait in
 * their rings, and are dropped when these are full. An engine that shares with nobody folds each step's observations at
 * its end. */
#ifndef MXD_TUNER_H
#define MXD_TUNER_H

#include "draft_policy.h"

enum { MXD_TUNER_READERS = 8 };

typedef struct mxd_tuner mxd_tuner;

/* A reader's place; one thread at a time. */
typedef struct mxd_reader {
    mxd_tuner *tuner;
    uint32_t place;
} mxd_reader;

/* Return the bytes of a tuner: nothing else is ever allocated. */
size_t mxd_tuner_bytes(void);
/* Open a tuner without readers; NULL if memory is short. */
mxd_tuner *mxd_tuner_open(const mxd_policy *first);
/* Join as a reader; returns whether there was a place. The last reader must not leave meanwhile. */
bool mxd_tuner_join(mxd_tuner *tuner, mxd_reader *out);
/* Leave; the last reader frees the tuner. */
void mxd_tuner_leave(mxd_reader *reader);

/* Begin a step and return its policy, valid until mxd_tuner_end(). */
const mxd_policy *mxd_tuner_begin(const mxd_reader *reader);
/* Report an observation within a step; others see it from the step's end on. */
void mxd_tuner_report(const mxd_reader *reader, const mxd_observation *observation);
void mxd_tuner_end(const mxd_reader *reader);

/* Publish new costs, between steps of this reader. Only this waits: for a writer, and for a free snapshot. */
void mxd_tuner_set_costs(const mxd_reader *reader, const mxd_costs *costs);

#endif
