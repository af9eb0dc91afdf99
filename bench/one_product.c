/* SPDX-License-Identifier: Apache-2.0 */
/* A matrix product of random operands with the kernels of this CPU, so often:
 *   one_product mxfp4|mxfp4x2|mxint8 ROWS TILES BLOCKS TIMES
 * mxfp4x2 has two planes. */
#include <stdlib.h>
#include <string.h>

#include "../../runtime/src/cpu.h"

static void *random_bytes(size_t n) {
    uint8_t *bytes = aligned_alloc(64, (n + 63) / 64 * 64);
    if (bytes == NULL) exit(1);
    for (size_t i = 0; i < n; i++) bytes[i] = (uint8_t)(rand() % 128);
    return bytes;
}

int main(int argc, char **argv) {
    if (argc != 6) return 2;
    int is_mxint8 = strcmp(argv[1], "mxint8") == 0, is_sum = strcmp(argv[1], "mxfp4x2") == 0;
    size_t rows = strtoul(argv[2], NULL, 10), tiles = strtoul(argv[3], NULL, 10), blocks = strtoul(argv[4], NULL, 10);
    mxd_kernels kernels;
    mxd_kernel_names names;
    mxd_error err;
    if (mxd_cpu_bind(&kernels, &names, &err)) return 1;
    float *x = random_bytes(rows * blocks * MXD_BLOCK * sizeof *x);
    for (size_t i = 0; i < rows * blocks * MXD_BLOCK; i++) x[i] = (float)(rand() % 256);
    mxd_act act = {.q = random_bytes(rows * blocks * MXD_BLOCK),
                   .s = random_bytes(rows * blocks * sizeof(float)),
                   .bias = random_bytes(rows * blocks * 2 * sizeof(int16_t))};
    kernels.quantize(x, blocks * MXD_BLOCK, rows, blocks * MXD_BLOCK, &act);
    const uint8_t *weights = random_bytes(tiles * blocks *
                                          (size_t)(is_mxint8 ? MXD_MXINT8_BLOCK_BYTES : MXD_MXFP4_BLOCK_BYTES));
    const uint8_t *residual = is_sum ? weights : NULL; /* equal planes: every rho is 0 */
    float *y = random_bytes(rows * tiles * MXD_TILE_ROWS * sizeof *y);
    mxd_matmul_fn *multiply = is_mxint8 ? kernels.matmul_mxint8 : kernels.matmul_mxfp4;
    for (unsigned long times = strtoul(argv[5], NULL, 10); times > 0; times--)
        multiply(weights, residual, blocks, tiles, &act, rows, y, tiles * MXD_TILE_ROWS);
    return 0;
}
