/* What machine this is: kernels for its CPU, threads and memory for this process, caches and heat. */
#ifndef MXD_CPU_H
#define MXD_CPU_H

#include "../kernels/kernels.h"
#include "status.h"

/* Bind the best kernels the CPU has. The environment variable MXDRAFT_CPU_MASK removes levels (comma-separated, e.g.
 * "avx2" or "dotprod,neon"), so that every variant can be tested; an unknown name is MXD_ERR_ARGUMENT. */
mxd_status mxd_cpu_bind(mxd_kernels *kernels, mxd_kernel_names *names, mxd_error *err);

/* One level of instruction sets. `present` is NULL where the level belongs to another architecture. */
typedef struct mxd_cpu_level {
    const char *name;
    int (*present)(void);
    void (*init)(mxd_kernels *, mxd_kernel_names *);
} mxd_cpu_level;

/* All levels, oldest first; for the kernel checks. */
const mxd_cpu_level *mxd_cpu_levels(size_t *count);

/* Bytes this process can still use: MemAvailable, cgroup limit and address-space limit, whichever is least.
 * `mapped` bytes are already mapped and so not charged against the address-space limit again. */
uint64_t mxd_memory_available(uint64_t mapped);
uint64_t mxd_peak_rss(void);

/* Bytes of the largest cache that the first CPU has, 0 if the system does not tell. */
uint64_t mxd_last_level_cache(void);
/* The hottest thermal zone in degrees Celsius, NaN if there is none. */
double mxd_temperature(void);
/* What `vcgencmd get_throttled` tells of a Raspberry Pi, -1 elsewhere. Bits 0..3: under-voltage, frequency capped,
 * throttled, soft temperature limit at this moment; bits 16..19: the same at any time since the start. */
int64_t mxd_throttle_flags(void);

#endif
