/* SPDX-License-Identifier: Apache-2.0 */
/* NEON with the dot product extension (armv8.2-a: Cortex-A76, Pi 5). Only this file and neon_i8mm.c may use it. */
#include "neon.h"

#if defined(__aarch64__)

#define TARGET __attribute__((target("dotprod")))
#define KERNEL(op) mxd_##op##_dotprod
enum { FEW_ROWS = 4, PASS_ROWS = 4, VECTORS = 2 };

#include "dotprod_template.h"
#include "matmul_template.h"

/* Assembler for the same reason as DOT. */
INLINE TARGET int32x4_t dot32(const int8x16_t a[2], const int8x16_t b[2]) {
    int32x4_t sum = vdupq_n_s32(0);
    UNROLL for (int i = 0; i < 2; i++)
        __asm__ volatile("sdot %0.4s, %1.16b, %2.16b" : "+w"(sum) : "w"(a[i]), "w"(b[i]));
    return sum;
}

#include "mx_blocks_template.h"

void mxd_kernels_init_dotprod(mxd_kernels *k, mxd_kernel_names *n) {
    MXD_BIND(k, n, matmul_mxfp4, dotprod);
    MXD_BIND(k, n, matmul_mxint8, dotprod);
    MXD_BIND(k, n, attention_mx, dotprod);
}

#endif
