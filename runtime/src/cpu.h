/* SPDX-License-Identifier: Apache-2.0 */
/* Instruction-set levels of the CPU, and the kernels to bind for it. */
#ifndef MXD_CPU_H
#define MXD_CPU_H

#include <stdbool.h>

#include "../kernels/kernels.h"
#include "status.h"

/* Bind the best kernels that the CPU has. The environment variable MXDRAFT_CPU_MASK removes levels (separated by
 * commas, e.g. "avx2" or "dotprod,neon"), so that every variant can be tested; an unknown name is MXD_ERR_ARGUMENT. */
mxd_status mxd_cpu_bind(mxd_kernels *kernels, mxd_kernel_names *names, mxd_error *err);

/* A step of an instruction set. `present` and `init` are NULL if it belongs to another architecture. */
typedef struct mxd_cpu_level {
    const char *name;
    bool (*present)(void);
    void (*init)(mxd_kernels *, mxd_kernel_names *);
} mxd_cpu_level;

/* Return all levels, oldest first, and their number. For the kernel checks. */
const mxd_cpu_level *mxd_cpu_levels(size_t *count);

#endif
