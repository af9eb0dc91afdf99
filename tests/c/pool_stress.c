/* SPDX-License-Identifier: Apache-2.0 */
/* Rounds of a thread pool, with threads that come late, so that the others spin, or sleep, at the barriers:
 *   pool_stress THREADS ROUNDS    prints the sum that all rounds made, and the one they should have made
 *   pool_stress THREADS ROUNDS N  the N-th thread cannot be started: prints the error
 * Link with -Wl,--wrap=pthread_create. */
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "../../runtime/src/threads.h"

enum { MAX_THREADS = 16 };

static int starts_left = -1; /* negative: no limit */

int __real_pthread_create(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*main)(void *), void *arg);

int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*main)(void *), void *arg) {
    if (starts_left == 0) return EAGAIN;
    if (starts_left > 0) starts_left--;
    return __real_pthread_create(thread, attributes, main, arg);
}

typedef struct round_state {
    mxd_pool *pool;
    unsigned round;
    unsigned long part[MAX_THREADS], seen[MAX_THREADS]; /* plain memory: only the barrier orders its accesses */
} round_state;

/* Each thread writes its part, then all read all parts. */
static void job(void *arg, uint32_t thread) {
    round_state *s = arg;
    uint32_t threads = mxd_pool_size(s->pool);
    if (s->round % 64 == 7 && thread == s->round / 64 % threads) usleep(2000);
    s->part[thread] = s->round * (thread + 1ul);
    if (threads > 1) mxd_pool_barrier(s->pool);
    s->seen[thread] = 0;
    for (uint32_t i = 0; i < threads; i++) s->seen[thread] += s->part[i];
}

int main(int argc, char **argv) {
    if (argc < 3) return 2;
    unsigned long threads = strtoul(argv[1], NULL, 10), rounds = strtoul(argv[2], NULL, 10), made = 0, expected = 0;
    if (argc > 3) starts_left = atoi(argv[3]) - 2; /* the caller is the first thread */
    static round_state s;
    mxd_error err;
    if (mxd_pool_open((uint32_t)threads, &s.pool, &err)) {
        printf("%d %s %s\n", err.status, err.message, s.pool ? "left open" : "closed");
        return 0;
    }
    for (s.round = 0; s.round < rounds; s.round++) {
        mxd_pool_run(s.pool, job, &s);
        for (unsigned long i = 0; i < threads; i++) made += s.seen[i];
        expected += s.round * threads * threads * (threads + 1) / 2;
    }
    mxd_pool_close(&s.pool);
    printf("%lu %lu\n", made, expected);
    return 0;
}
