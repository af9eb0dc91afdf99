/* SPDX-License-Identifier: Apache-2.0 */
#include "tuner.h"

#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

/* A ring holds what two of the widest steps observe. */
enum { SNAPSHOTS = 8, RING = 1024, LINE = 64 };

static const uint64_t FREE = 0, CURRENT = UINT64_MAX; /* of mxd_snapshot.replaced */
static const uint64_t READS_NONE = UINT64_MAX;        /* of place.seen */

typedef struct snapshot {
    mxd_policy policy;
    uint64_t replaced; /* the publication that replaced it; only the writer looks */
} snapshot;

/* A reader's place. Only the reader moves `tail`, only the writer moves `head`. */
typedef struct place {
    _Alignas(LINE) _Atomic uint64_t seen; /* publications when its step began, or READS_NONE */
    atomic_int taken;
    atomic_uint head, tail;
    unsigned reported; /* after `tail`: of the step under way */
    mxd_observation ring[RING];
} place;

struct mxd_tuner {
    snapshot *_Atomic current;
    _Atomic uint64_t publications;
    atomic_flag writing;
    atomic_uint readers;
    snapshot snapshots[SNAPSHOTS];
    place places[MXD_TUNER_READERS];
};

size_t mxd_tuner_bytes(void) {
    return sizeof(mxd_tuner);
}

mxd_tuner *mxd_tuner_open(const mxd_policy *first) {
    void *memory = NULL;
    if (posix_memalign(&memory, LINE, sizeof(mxd_tuner))) return NULL;
    mxd_tuner *t = memset(memory, 0, sizeof(mxd_tuner));
    atomic_flag_clear(&t->writing);
    for (int i = 0; i < MXD_TUNER_READERS; i++) atomic_init(&t->places[i].seen, READS_NONE);
    t->snapshots[0] = (snapshot){*first, CURRENT};
    atomic_init(&t->current, &t->snapshots[0]);
    return t;
}

bool mxd_tuner_join(mxd_tuner *t, mxd_reader *out) {
    for (uint32_t i = 0; i < MXD_TUNER_READERS; i++) {
        int none = 0;
        if (!atomic_compare_exchange_strong(&t->places[i].taken, &none, 1)) continue;
        atomic_fetch_add(&t->readers, 1);
        *out = (mxd_reader){t, i};
        return true;
    }
    return false;
}

void mxd_tuner_leave(mxd_reader *r) {
    mxd_tuner *t = r->tuner;
    if (!t) return;
    atomic_store(&t->places[r->place].taken, 0);
    if (atomic_fetch_sub(&t->readers, 1) == 1) free(t);
    r->tuner = NULL;
}

const mxd_policy *mxd_tuner_begin(const mxd_reader *r) {
    /* Sequentially consistent, as is the writer's side: either the writer sees this store before it looks for a free
     * snapshot, or this load sees what the writer published. An older number only keeps more snapshots. */
    atomic_store(&r->tuner->places[r->place].seen, atomic_load(&r->tuner->publications));
    return &atomic_load(&r->tuner->current)->policy;
}

void mxd_tuner_report(const mxd_reader *r, const mxd_observation *o) {
    place *mine = &r->tuner->places[r->place];
    unsigned tail = atomic_load_explicit(&mine->tail, memory_order_relaxed) + mine->reported;
    if (tail - atomic_load_explicit(&mine->head, memory_order_acquire) == RING) return;
    mine->ring[tail % RING] = *o;
    mine->reported++;
}

/* ---- the writer: whoever has the flag ---- */

/* Return the number of publications that every reader has seen. */
static uint64_t seen_by_all(mxd_tuner *t) {
    uint64_t least = READS_NONE;
    for (int i = 0; i < MXD_TUNER_READERS; i++) {
        uint64_t seen = atomic_load(&t->places[i].seen);
        if (seen < least) least = seen;
    }
    return least;
}

/* Return a snapshot that nobody reads, or NULL. */
static snapshot *find_free(mxd_tuner *t) {
    snapshot *found = NULL;
    uint64_t seen = seen_by_all(t);
    for (int i = 0; i < SNAPSHOTS; i++) {
        snapshot *s = &t->snapshots[i];
        if (s->replaced != FREE && s->replaced != CURRENT && s->replaced <= seen) {
            s->replaced = FREE;
#ifdef MXD_DEBUG
            memset(&s->policy, 0xa5, sizeof s->policy); /* make every read from now on show */
#endif
        }
        if (s->replaced == FREE) found = s;
    }
    return found;
}

static void publish(mxd_tuner *t, snapshot *next) {
    next->replaced = CURRENT;
    snapshot *last = atomic_exchange(&t->current, next);
    last->replaced = atomic_fetch_add(&t->publications, 1) + 1;
}

static bool has_observations(mxd_tuner *t) {
    for (int i = 0; i < MXD_TUNER_READERS; i++)
        if (atomic_load(&t->places[i].tail) != atomic_load(&t->places[i].head)) return true;
    return false;
}

static void fold(mxd_tuner *t) {
    snapshot *next = has_observations(t) ? find_free(t) : NULL;
    if (!next) return;
    next->policy = atomic_load(&t->current)->policy;
    for (int i = 0; i < MXD_TUNER_READERS; i++) {
        place *of = &t->places[i];
        unsigned head = atomic_load(&of->head), tail = atomic_load_explicit(&of->tail, memory_order_acquire);
        for (; head != tail; head++) mxd_policy_learn(&next->policy, &of->ring[head % RING]);
        atomic_store_explicit(&of->head, head, memory_order_release);
    }
    publish(t, next);
}

void mxd_tuner_end(const mxd_reader *r) {
    mxd_tuner *t = r->tuner;
    place *mine = &t->places[r->place];
    atomic_fetch_add_explicit(&mine->tail, mine->reported, memory_order_release);
    mine->reported = 0;
    atomic_store(&mine->seen, READS_NONE);
    if (atomic_flag_test_and_set_explicit(&t->writing, memory_order_acquire)) return;
    fold(t);
    atomic_flag_clear_explicit(&t->writing, memory_order_release);
}

void mxd_tuner_set_costs(const mxd_reader *r, const mxd_costs *costs) {
    mxd_tuner *t = r->tuner;
    snapshot *next;
    while (atomic_flag_test_and_set_explicit(&t->writing, memory_order_acquire)) sched_yield();
    while (!(next = find_free(t))) sched_yield();
    next->policy = atomic_load(&t->current)->policy;
    mxd_policy_set_costs(&next->policy, costs);
    publish(t, next);
    atomic_flag_clear_explicit(&t->writing, memory_order_release);
}
