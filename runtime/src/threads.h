/* SPDX-License-Identifier: Apache-2.0 */
/* A fixed pool: threads meet at spin-then-sleep barriers; no lock is taken while all of them are running. */
#ifndef MXD_THREADS_H
#define MXD_THREADS_H

#include "status.h"

typedef struct mxd_pool mxd_pool;

/* Start a pool; `threads` includes the caller, which is thread 0. */
mxd_status mxd_pool_open(uint32_t threads, mxd_pool **out, mxd_error *err);
void mxd_pool_close(mxd_pool **pool);
uint32_t mxd_pool_size(const mxd_pool *pool);
/* Run job(arg, thread) on every thread of the pool; returns when all are done. */
void mxd_pool_run(mxd_pool *pool, void (*job)(void *arg, uint32_t thread), void *arg);
/* Wait, inside a job, until every thread is here. Writes before it are visible to all after it. */
void mxd_pool_barrier(mxd_pool *pool);

/* Set from..to to part `thread` of `n` equal static parts of [0, total). */
static inline void mxd_split(size_t total, uint32_t n, uint32_t thread, size_t *from, size_t *to) {
    *from = total * thread / n;
    *to = total * (thread + 1) / n;
}

#endif
