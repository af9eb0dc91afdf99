/* SPDX-License-Identifier: Apache-2.0 */
#include "threads.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

/* Some 50 us: longer than a phase of a decode step, shorter than a scheduler tick. A test makes it endless. */
#ifndef MXD_POOL_SPINS
#define MXD_POOL_SPINS 4000
#endif

struct mxd_pool {
    atomic_uint threads; /* lowered once if a thread cannot be started */
    atomic_uint arrived, phase, sleepers;
    pthread_mutex_t mutex; /* only for those who gave up spinning */
    pthread_cond_t wake;
    void (*job)(void *, uint32_t); /* NULL: leave */
    void *arg;
    struct worker {
        mxd_pool *pool;
        pthread_t handle;
        uint32_t index;
    } workers[];
};

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

void mxd_pool_barrier(mxd_pool *p) {
    unsigned phase = atomic_load(&p->phase);
    if (atomic_fetch_add(&p->arrived, 1) + 1 == p->threads) {
        atomic_store(&p->arrived, 0);
        atomic_store(&p->phase, phase + 1);
        /* Sequentially consistent: a sleeper counted after this load sees the new phase and does not sleep. */
        if (atomic_load(&p->sleepers)) {
            pthread_mutex_lock(&p->mutex);
            pthread_cond_broadcast(&p->wake);
            pthread_mutex_unlock(&p->mutex);
        }
        return;
    }
    for (int i = 0; i < MXD_POOL_SPINS; i++) {
        if (atomic_load_explicit(&p->phase, memory_order_acquire) != phase) return;
        relax();
    }
    atomic_fetch_add(&p->sleepers, 1);
    pthread_mutex_lock(&p->mutex);
    while (atomic_load(&p->phase) == phase) pthread_cond_wait(&p->wake, &p->mutex);
    pthread_mutex_unlock(&p->mutex);
    atomic_fetch_sub(&p->sleepers, 1);
}

static void *worker_main(void *arg) {
    struct worker *w = arg;
    mxd_pool *p = w->pool;
    for (;;) {
        mxd_pool_barrier(p);
        if (!p->job) return NULL;
        p->job(p->arg, w->index);
        mxd_pool_barrier(p);
    }
}

/* Start a round: with one thread there is nobody to meet. */
static void start(mxd_pool *p, void (*job)(void *, uint32_t), void *arg) {
    p->job = job;
    p->arg = arg;
    if (p->threads > 1) mxd_pool_barrier(p);
}

void mxd_pool_run(mxd_pool *p, void (*job)(void *, uint32_t), void *arg) {
    start(p, job, arg);
    job(arg, 0);
    if (p->threads > 1) mxd_pool_barrier(p);
}

uint32_t mxd_pool_size(const mxd_pool *pool) {
    return pool->threads;
}

mxd_status mxd_pool_open(uint32_t threads, mxd_pool **out, mxd_error *err) {
    *out = NULL;
    mxd_pool *p = calloc(1, sizeof *p + threads * sizeof p->workers[0]);
    if (!p) return mxd_fail(err, MXD_ERR_MEMORY, "out of memory for %u threads", threads);
    pthread_mutex_init(&p->mutex, NULL);
    pthread_cond_init(&p->wake, NULL);
    p->threads = threads;
    for (uint32_t i = 1; i < threads; i++) {
        p->workers[i] = (struct worker){.pool = p, .index = i};
        int code = pthread_create(&p->workers[i].handle, NULL, worker_main, &p->workers[i]);
        if (code) {
            /* Those already waiting leave through a barrier of their own number. */
            p->threads = i;
            mxd_pool_close(&p);
            return mxd_fail(err, MXD_ERR_MEMORY, "cannot start thread %u of %u: %s", i + 1, threads, strerror(code));
        }
    }
    *out = p;
    return MXD_OK;
}

void mxd_pool_close(mxd_pool **pool) {
    mxd_pool *p = *pool;
    if (!p) return;
    start(p, NULL, NULL);
    for (uint32_t i = 1; i < p->threads; i++) pthread_join(p->workers[i].handle, NULL);
    pthread_cond_destroy(&p->wake);
    pthread_mutex_destroy(&p->mutex);
    free(p);
    *pool = NULL;
}
