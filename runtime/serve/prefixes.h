/* SPDX-License-Identifier: Apache-2.0 */
/* The prompt cache: all sequences of an engine, those that answer and those that are parked. A new prompt starts as a
 * copy of the one that shares the longest beginning with it. Copies and truncation are exact (mxdraft.h), so an answer is
 * the same with the cache and without. */
#ifndef MXDRAFT_SERVE_PREFIXES_H
#define MXDRAFT_SERVE_PREFIXES_H

#include "../cli/cli.h"

enum { MOST_SEQUENCES = 64 };

typedef struct prefix_cache {
    mxd_engine *engine;
    uint32_t count; /* sequences that the engine holds, 1..MOST_SEQUENCES */
    uint64_t clock;
    struct {
        mxd_seq *seq; /* NULL: free */
        bool parked;
        uint64_t used; /* the clock when it was parked or copied */
    } places[MOST_SEQUENCES];
} prefix_cache;

/* Open a sequence for the prompt ids[n], queued but for the *cached tokens at its beginning that another sequence has
 * processed. The parked sequence that was used longest ago makes room. At most count - 1 others may be in use. */
mxd_status prefix_open(prefix_cache *c, const uint32_t *ids, size_t n, const mxd_sampling *sampling, mxd_seq **out,
                       size_t *cached, mxd_error *error);
/* Keep a sequence for prompts that begin like it, in place of those that it continues. */
void prefix_park(prefix_cache *c, mxd_seq **seq);
/* Close a sequence that is in use. */
void prefix_close(prefix_cache *c, mxd_seq **seq);
uint32_t prefix_parked(const prefix_cache *c);

#endif
