/* SPDX-License-Identifier: Apache-2.0 */
/* This file is a template: `dots` (matmul_template.h) by the dot product extension. The file of a level that has the
 * extension includes it once, with these defined:
 *
 *   TARGET       attribute of every function
 *   PASS_ROWS    most activation rows in one pass */

/* vdotq_laneq_s32 that stays where it is: on its own, the compiler moves these so far that it spills accumulators. */
#define DOT(d, w, q, lane) __asm__ volatile("sdot %0.4s, %1.16b, %2.4b[" #lane "]" : "+w"(d) : "w"(w), "w"(q))

INLINE TARGET void dots(elements form, const weights *w, const int8_t *const q[PASS_ROWS], int R, int v0, int V,
                        int32x4_t d[PASS_ROWS][4]) {
    int8x16_t columns[PASS_ROWS][2];
    UNROLL for (int r = 0; r < R; r++) {
        UNROLL for (int v = 0; v < V; v++) d[r][v] = vdupq_n_s32(0);
        columns[r][0] = vld1q_s8(q[r]);
        columns[r][1] = vld1q_s8(q[r] + 16);
    }
/* Columns 8*pair .. 8*pair+7 are two lanes of half a row. Lanes are literals, hence a macro and not a loop. */
#define COLUMNS(pair, half, lane0, lane1) \
    UNROLL for (int v = 0; v < V; v += 2) { \
        int8x16x2_t w0 = load_pair(form, w, pair, v0 + v), w1 = load_pair(form, w, pair, v0 + v + 1); \
        UNROLL for (int r = 0; r < R; r++) DOT(d[r][v], w0.val[0], columns[r][half], lane0); \
        UNROLL for (int r = 0; r < R; r++) DOT(d[r][v + 1], w1.val[0], columns[r][half], lane0); \
        UNROLL for (int r = 0; r < R; r++) DOT(d[r][v], w0.val[1], columns[r][half], lane1); \
        UNROLL for (int r = 0; r < R; r++) DOT(d[r][v + 1], w1.val[1], columns[r][half], lane1); \
    }
    COLUMNS(0, 0, 0, 1)
    COLUMNS(1, 0, 2, 3)
    COLUMNS(2, 1, 0, 1)
    COLUMNS(3, 1, 2, 3)
#undef COLUMNS
}
