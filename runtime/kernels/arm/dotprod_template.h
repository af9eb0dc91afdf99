/* This file is a template: `dots` (matmul_template.h) by the dot product extension. The file of a level that has the
 * extension includes it once, with these defined:
 *
 *   TARGET   attribute of every function
 *   UNITS    most digit rows in one pass */

/* vdotq_laneq_s32 that stays where it is: on its own, the compiler moves these so far that it spills accumulators. */
#define DOT(d, w, q, lane) __asm__ volatile("sdot %0.4s, %1.16b, %2.4b[" #lane "]" : "+w"(d) : "w"(w), "w"(q))

INLINE TARGET void dots(elements form, const uint8_t *w, const int8_t *const q[UNITS], int units, int v0, int V,
                        int32x4_t d[UNITS][4]) {
    int8x16_t digits[UNITS][2];
    UNROLL for (int u = 0; u < units; u++) {
        UNROLL for (int v = 0; v < V; v++) d[u][v] = vdupq_n_s32(0);
        digits[u][0] = vld1q_s8(q[u]);
        digits[u][1] = vld1q_s8(q[u] + 16);
    }
/* Columns 8*pair .. 8*pair+7 are two lanes of half the digits. Lanes are literals, hence a macro and not a loop. */
#define COLUMNS(pair, half, lane0, lane1)                                                                  \
    UNROLL for (int v = 0; v < V; v += 2) {                                                                \
        int8x16x2_t w0 = load_pair(form, w, pair, v0 + v), w1 = load_pair(form, w, pair, v0 + v + 1);      \
        UNROLL for (int u = 0; u < units; u++) DOT(d[u][v], w0.val[0], digits[u][half], lane0);            \
        UNROLL for (int u = 0; u < units; u++) DOT(d[u][v + 1], w1.val[0], digits[u][half], lane0);        \
        UNROLL for (int u = 0; u < units; u++) DOT(d[u][v], w0.val[1], digits[u][half], lane1);            \
        UNROLL for (int u = 0; u < units; u++) DOT(d[u][v + 1], w1.val[1], digits[u][half], lane1);        \
    }
    COLUMNS(0, 0, 0, 1)
    COLUMNS(1, 0, 2, 3)
    COLUMNS(2, 1, 0, 1)
    COLUMNS(3, 1, 2, 3)
#undef COLUMNS
}
