/* SPDX-License-Identifier: Apache-2.0 */
/* This file is a template: `attention` of a level, around its `score`, `softmax` and `mix`. The level's file includes
 * it once, with these defined:
 *
 *   TARGET       attribute of every function
 *   KERNEL(op)   name of a kernel
 *   LANES        f32 values of a vector
 *   HEADS        most query heads at a time; the functions are inlined with 1 .. HEADS = 3 as a constant
 *   score(q, heads, k, n, d, scale, scores)            writes the scores of heads x n keys
 *   softmax(scores, n)                                 in place; returns the inverse of their sum
 *   mix(scores, inverse, heads, V, v, n, d, out)       writes V vectors of every head's output, from v and out on */

INLINE void attend(const float *q, int heads, const uint16_t *k, const uint16_t *v, size_t n, size_t d, float scale,
                   float *scores, float *out) {
    float inverse[HEADS];
    score(q, heads, k, n, d, scale, scores);
    for (int h = 0; h < heads; h++) inverse[h] = softmax(scores + (size_t)h * n, n);
    size_t i = 0;
    for (; i + 32 <= d; i += 32) mix(scores, inverse, heads, 32 / LANES, v + i, n, d, out + i);
    if (i < d) mix(scores, inverse, heads, 16 / LANES, v + i, n, d, out + i);
}

TARGET static void KERNEL(attention)(const float *q, size_t heads, const uint16_t *k, const uint16_t *v, size_t n,
                                     size_t d, float scale, float *scores, float *out) {
    if (d % 16) {
        mxd_attention_ref(q, heads, k, v, n, d, scale, scores, out);
        return;
    }
    for (; heads >= HEADS; heads -= HEADS, q += HEADS * d, out += HEADS * d, scores += HEADS * n)
        attend(q, HEADS, k, v, n, d, scale, scores, out);
    if (heads == 2) attend(q, 2, k, v, n, d, scale, scores, out);
    if (heads == 1) attend(q, 1, k, v, n, d, scale, scores, out);
}
