/* SPDX-License-Identifier: Apache-2.0 */
#include "prefixes.h"

enum { NOWHERE = MOST_SEQUENCES };

/* Count the tokens at the beginning of ids[n] that a sequence holds. */
static size_t shared_with(const mxd_seq *seq, const uint32_t *ids, size_t n) {
    size_t held_count, shared = 0;
    const uint32_t *held = mxd_seq_tokens(seq, &held_count);
    while (shared < held_count && shared < n && held[shared] == ids[shared]) shared++;
    return shared;
}

/* Find who shares most with ids[n], and how much that is. */
static uint32_t longest(const prefix_cache *c, const uint32_t *ids, size_t n, size_t *shared) {
    uint32_t best = NOWHERE;
    *shared = 0;
    for (uint32_t i = 0; i < c->count; i++) {
        size_t here = c->places[i].seq ? shared_with(c->places[i].seq, ids, n) : 0;
        if (here <= *shared) continue;
        *shared = here;
        best = i;
    }
    return best;
}

static uint32_t free_place(const prefix_cache *c) {
    for (uint32_t i = 0; i < c->count; i++)
        if (!c->places[i].seq) return i;
    return NOWHERE;
}

/* Return a free place; if there is none, that of the parked sequence used longest ago, but for `spared`. */
static uint32_t make_room(prefix_cache *c, uint32_t spared) {
    uint32_t place = free_place(c);
    if (place != NOWHERE) return place;
    for (uint32_t i = 0; i < c->count; i++)
        if (c->places[i].parked && i != spared && (place == NOWHERE || c->places[i].used < c->places[place].used))
            place = i;
    if (place != NOWHERE) mxd_seq_close(&c->places[place].seq);
    return place;
}

mxd_status prefix_open(prefix_cache *c, const uint32_t *ids, size_t n, const mxd_sampling *sampling, mxd_seq **out,
                       size_t *cached, mxd_error *error) {
    size_t shared;
    uint32_t from = longest(c, ids, n - 1, &shared); /* the last token runs again: what follows it is wanted */
    uint32_t place = make_room(c, from);
    if (place == NOWHERE) { /* the only parked sequence has to give its own place */
        from = NOWHERE;
        place = make_room(c, NOWHERE);
    }
    mxd_seq *seq;
    mxd_status status = from == NOWHERE ? mxd_seq_open(c->engine, sampling, &seq, error)
                                        : mxd_seq_copy(c->places[from].seq, sampling, &seq, error);
    if (status) return status;
    if (from == NOWHERE) shared = 0;
    else c->places[from].used = ++c->clock;
    status = mxd_seq_truncate(seq, shared, error);
    if (!status) status = mxd_seq_prompt(seq, ids + shared, n - shared, error);
    if (status) {
        mxd_seq_close(&seq);
        return status;
    }
    mxd_stats stats;
    mxd_seq_get_stats(seq, &stats);
    *cached = n - (size_t)stats.prompt_tokens;
    c->places[place].seq = *out = seq;
    c->places[place].parked = false;
    return MXD_OK;
}

/* Tell whether all that `shorter` holds begins `longer`. */
static bool continues(const mxd_seq *longer, const mxd_seq *shorter) {
    size_t n, most;
    const uint32_t *ids = mxd_seq_tokens(shorter, &n);
    mxd_seq_tokens(longer, &most);
    return n <= most && shared_with(longer, ids, n) == n;
}

void prefix_park(prefix_cache *c, mxd_seq **seq) {
    for (uint32_t i = 0; i < c->count; i++) {
        if (c->places[i].seq == *seq) {
            c->places[i].parked = true;
            c->places[i].used = ++c->clock;
        } else if (c->places[i].seq && c->places[i].parked && continues(*seq, c->places[i].seq)) {
            mxd_seq_close(&c->places[i].seq);
        }
    }
    *seq = NULL;
}

void prefix_close(prefix_cache *c, mxd_seq **seq) {
    for (uint32_t i = 0; i < c->count; i++)
        if (c->places[i].seq == *seq) c->places[i].seq = NULL;
    mxd_seq_close(seq);
}

uint32_t prefix_parked(const prefix_cache *c) {
    uint32_t parked = 0;
    for (uint32_t i = 0; i < c->count; i++) parked += c->places[i].seq && c->places[i].parked;
    return parked;
}
