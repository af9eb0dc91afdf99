/* The clock that durations are measured with. */
#ifndef MXD_CLOCK_H
#define MXD_CLOCK_H

#include <time.h>

/* Seconds since some moment. */
static inline double mxd_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

#endif
