/* Attention over quantized rows of a level, around its `attend_mx`: up to HEADS query heads over all spans, n rows.
 * Included once by each level's file, with TARGET, HEADS = 3, attend_mx and the name ATTENTION_MX defined. */

TARGET static void ATTENTION_MX(const mxd_act *q, size_t heads, const mxd_span *spans, size_t count, size_t d,
                                float scale, float *scores, float *out) {
    size_t n = 0, nblocks = d / BLOCK;
    mxd_act some = *q;
    for (size_t s = 0; s < count; s++) n += spans[s].n;
    for (; heads >= HEADS; heads -= HEADS, scores += HEADS * n, out += HEADS * d) {
        attend_mx(&some, HEADS, spans, count, n, d, scale, scores, out);
        some.q += HEADS * d;
        some.s += HEADS * nblocks;
        some.bias += HEADS * nblocks * 2;
    }
    if (heads == 2) attend_mx(&some, 2, spans, count, n, d, scale, scores, out);
    if (heads == 1) attend_mx(&some, 1, spans, count, n, d, scale, scores, out);
}
