/* SPDX-License-Identifier: Apache-2.0 */
/* The clock for durations. */
#ifndef MXD_CLOCK_H
#define MXD_CLOCK_H

#include <time.h>

/* Return the seconds since some fixed moment. */
static inline double mxd_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

#endif
