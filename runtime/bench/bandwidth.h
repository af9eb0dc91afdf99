/* How fast this machine's memory can be read: the roof of decoding, which streams all weights for every token. */
#ifndef MXD_BANDWIDTH_H
#define MXD_BANDWIDTH_H

#include "../src/status.h"

typedef struct mxd_bandwidth mxd_bandwidth;

/* A buffer of four times the last-level cache, at least 64 MiB, and as many threads as the engine has. */
mxd_status mxd_bandwidth_open(uint32_t threads, mxd_bandwidth **out, mxd_error *err);
void mxd_bandwidth_close(mxd_bandwidth **probe);
/* Bytes a second of the best of some 50 ms of passes over the buffer. */
double mxd_bandwidth_measure(mxd_bandwidth *probe);
size_t mxd_bandwidth_bytes(const mxd_bandwidth *probe);

#endif
