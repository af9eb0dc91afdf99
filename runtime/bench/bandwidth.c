/* SPDX-License-Identifier: Apache-2.0 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "bandwidth.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "../src/clock.h"
#include "../src/machine.h"
#include "../src/threads.h"

enum { LEAST_BYTES = 64 << 20, CACHES = 4 };

static const double MEASURE_S = 0.05;

struct mxd_bandwidth {
    mxd_pool *pool;
    uint64_t *words;
    size_t count;
    _Atomic uint64_t sum; /* so that the reads are not optimised away */
};

static size_t bytes_of(const mxd_bandwidth *b) {
    return b->count * sizeof *b->words;
}

/* Fill a thread's part, which makes its pages real: those never written to are all the same page of zeros. */
static void fill(void *arg, uint32_t thread) {
    mxd_bandwidth *b = arg;
    size_t from, to;
    mxd_split(b->count, mxd_pool_size(b->pool), thread, &from, &to);
    for (size_t i = from; i < to; i++) b->words[i] = i;
}

static void read_part(void *arg, uint32_t thread) {
    mxd_bandwidth *b = arg;
    size_t from, to;
    uint64_t sum = 0;
    mxd_split(b->count, mxd_pool_size(b->pool), thread, &from, &to);
    for (size_t i = from; i < to; i++) sum += b->words[i];
    atomic_store_explicit(&b->sum, sum, memory_order_relaxed);
}

mxd_status mxd_bandwidth_open(uint32_t threads, mxd_bandwidth **out, mxd_error *err) {
    *out = NULL;
    size_t bytes = CACHES * mxd_last_level_cache();
    if (bytes < LEAST_BYTES) bytes = LEAST_BYTES;
    mxd_bandwidth *b = calloc(1, sizeof *b);
    if (!b) return mxd_fail(err, MXD_ERR_MEMORY, "out of memory");
    void *words = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (words == MAP_FAILED) {
        free(b);
        return mxd_fail(err, MXD_ERR_MEMORY, "cannot reserve %zu bytes to measure read bandwidth", bytes);
    }
    b->words = words;
    b->count = bytes / sizeof *b->words;
    mxd_status status = mxd_pool_open(threads, &b->pool, err);
    if (status) {
        mxd_bandwidth_close(&b);
        return status;
    }
    mxd_pool_run(b->pool, fill, b);
    *out = b;
    return MXD_OK;
}

void mxd_bandwidth_close(mxd_bandwidth **probe) {
    mxd_bandwidth *b = *probe;
    if (!b) return;
    mxd_pool_close(&b->pool);
    munmap(b->words, bytes_of(b));
    free(b);
    *probe = NULL;
}

double mxd_bandwidth_measure(mxd_bandwidth *b) {
    double start = mxd_now(), before = start, best = 0;
    do {
        mxd_pool_run(b->pool, read_part, b);
        double after = mxd_now(), speed = (double)bytes_of(b) / (after - before);
        if (speed > best) best = speed;
        before = after;
    } while (before - start < MEASURE_S);
    return best;
}
