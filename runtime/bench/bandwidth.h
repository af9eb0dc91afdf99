/* SPDX-License-Identifier: Apache-2.0 */
/* How fast this machine reads memory: the roof of decoding, which streams all weights for every token. */
#ifndef MXD_BANDWIDTH_H
#define MXD_BANDWIDTH_H

#include "../src/status.h"

typedef struct mxd_bandwidth mxd_bandwidth;

/* Fill a buffer of four last-level caches, at least 64 MiB, by `threads` threads. */
mxd_status mxd_bandwidth_open(uint32_t threads, mxd_bandwidth **out, mxd_error *err);
void mxd_bandwidth_close(mxd_bandwidth **probe);
/* Read the buffer for some 50 ms and return the bytes a second of the fastest pass. */
double mxd_bandwidth_measure(mxd_bandwidth *probe);

#endif
