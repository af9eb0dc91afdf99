/* SPDX-License-Identifier: Apache-2.0 */
/* Readers of one tuner on threads of their own, some of which hold their snapshots for long:
 *   tuner_stress READERS STEPS    prints "steps accepted-looking" numbers, or how a snapshot was wrong
 * Each step reports a draft of the first and one of the last kind, both accepted, so that every consistent snapshot has
 * tried both equally often and has nothing else. Snapshots that were given back are poisoned (-DMXD_DEBUG). */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../runtime/src/tuner.h"

enum { MAX_READERS = MXD_TUNER_READERS };

static mxd_tuner *tuner;
static unsigned long steps;
static atomic_ulong wrong, changes, finished;

static int is_whole(const mxd_policy *p) {
    float first = p->kind[0].tried, last = p->kind[MXD_KINDS - 1].tried;
    return first == last && first >= 0 && first <= 48 && p->kind[0].accepted == first && p->kind[1].tried == 0 &&
           p->patience > 0 && p->patience < 1000;
}

static void *reader_main(void *arg) {
    unsigned long number = (unsigned long)arg;
    mxd_reader reader;
    mxd_observation draft = {.type = MXD_OBSERVED_DRAFT, .accepted = 1};
    const mxd_policy *last = NULL;
    if (!mxd_tuner_join(tuner, &reader)) abort();
    for (unsigned long i = 0; i < steps; i++) {
        const mxd_policy *policy = mxd_tuner_begin(&reader);
        mxd_policy copy = *policy;
        changes += policy != last;
        last = policy;
        for (uint8_t k = 0; k < 2; k++) {
            draft.kind = k ? MXD_KINDS - 1 : 0;
            mxd_tuner_report(&reader, &draft);
        }
        /* The longer it is held, the more is published meanwhile. */
        for (unsigned long k = 0; k < (i % 64 == number ? 200 : i % 4); k++) sched_yield();
        wrong += !is_whole(policy) || memcmp(&copy, policy, sizeof copy);
        mxd_tuner_end(&reader);
        if (i % 500 == 499) { /* as when an engine closes and another one opens */
            mxd_tuner_leave(&reader);
            if (!mxd_tuner_join(tuner, &reader)) abort();
        }
    }
    mxd_tuner_leave(&reader);
    finished++;
    return NULL;
}

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    unsigned long readers = strtoul(argv[1], NULL, 10);
    steps = strtoul(argv[2], NULL, 10);
    pthread_t threads[MAX_READERS];
    mxd_policy first;
    mxd_reader own;
    mxd_policy_init(&first, &(mxd_weights){.gamma = 1});
    tuner = mxd_tuner_open(&first);
    if (!tuner || readers >= MAX_READERS || !mxd_tuner_join(tuner, &own)) return 2;
    for (unsigned long i = 0; i < readers; i++) pthread_create(&threads[i], NULL, reader_main, (void *)i);
    mxd_costs costs = {.step = {[1] = 1}};
    while (finished < readers) { /* an engine whose caller sets costs now and then, and runs no step */
        mxd_tuner_set_costs(&own, &costs);
        for (int k = 0; k < 50; k++) sched_yield();
    }
    for (unsigned long i = 0; i < readers; i++) pthread_join(threads[i], NULL);
    float tried = mxd_tuner_begin(&own)->kind[0].tried;
    mxd_tuner_end(&own);
    mxd_tuner_leave(&own);
    printf("wrong %lu snapshots %lu tried %d\n", (unsigned long)wrong, (unsigned long)changes, tried >= 24);
    return wrong != 0;
}
