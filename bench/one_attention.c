/* SPDX-License-Identifier: Apache-2.0 */
/* Attention of query heads over random quantized keys and values with the kernels of this CPU, so often:
 *   one_attention mxint8|mxfp4|normal4 HEADS N D TIMES */
#include <stdlib.h>
#include <string.h>

#include "../../runtime/src/cpu.h"

static void *bytes(size_t n) {
    uint8_t *new = aligned_alloc(64, (n + 63) / 64 * 64);
    if (new == NULL) exit(1);
    for (size_t i = 0; i < n; i++) new[i] = (uint8_t)(rand() % 128); /* as f32 finite; as a scale normal */
    return new;
}

int main(int argc, char **argv) {
    if (argc != 6) return 2;
    size_t heads = strtoul(argv[2], NULL, 10), n = strtoul(argv[3], NULL, 10), d = strtoul(argv[4], NULL, 10);
    mxd_kernels kernels;
    mxd_kernel_names names;
    mxd_error err;
    if (mxd_cpu_bind(&kernels, &names, &err)) return 1;
    mxd_row_format format = strcmp(argv[1], "mxint8") == 0  ? MXD_ROW_MXINT8
                            : strcmp(argv[1], "mxfp4") == 0 ? MXD_ROW_MXFP4
                                                            : MXD_ROW_NORMAL4;
    mxd_act q = {.q = bytes(heads * d), .s = bytes(heads * d / MXD_BLOCK * sizeof(float)), .bias = bytes(heads * d)};
    mxd_span span = {format, bytes(n * mxd_row_bytes(format, d)), bytes(n * mxd_row_bytes(format, d)), n};
    float *scores = bytes(heads * n * sizeof *scores), *out = bytes(heads * d * sizeof *out);
    for (unsigned long times = strtoul(argv[5], NULL, 10); times > 0; times--)
        kernels.attention_mx(&q, heads, &span, 1, d, 0.125f, scores, out);
    return 0;
}
