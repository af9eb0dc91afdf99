/* SPDX-License-Identifier: Apache-2.0 */
#include "sampler.h"

#include <math.h>
#include <string.h>

void mxd_sampling_default(mxd_sampling *out) {
    *out = (mxd_sampling){.top_p = 1, .repeat_penalty = 1};
}

mxd_status mxd_sampling_check(const mxd_sampling *s, mxd_error *err) {
    mxd_status status = mxd_check_reserved("mxd_sampling", s->reserved, sizeof s->reserved / sizeof *s->reserved, err);
    if (status) return status;
    if (!(s->temperature == 0 || (s->temperature >= 1e-4f && s->temperature <= 100)))
        return mxd_fail(err, MXD_ERR_ARGUMENT, "temperature %g is not in 0.0001..100, nor 0", (double)s->temperature);
    if (!(s->top_p > 0 && s->top_p <= 1))
        return mxd_fail(err, MXD_ERR_ARGUMENT, "top_p %g is not in (0, 1]", (double)s->top_p);
    if (!(s->min_p >= 0 && s->min_p <= 1))
        return mxd_fail(err, MXD_ERR_ARGUMENT, "min_p %g is not in 0..1", (double)s->min_p);
    if (!(s->repeat_penalty >= 0.1f && s->repeat_penalty <= 10))
        return mxd_fail(err, MXD_ERR_ARGUMENT, "repeat_penalty %g is not in 0.1..10", (double)s->repeat_penalty);
    if (!(s->presence_penalty >= -2 && s->presence_penalty <= 2))
        return mxd_fail(err, MXD_ERR_ARGUMENT, "presence_penalty %g is not in -2..2", (double)s->presence_penalty);
    if (!(s->frequency_penalty >= -2 && s->frequency_penalty <= 2))
        return mxd_fail(err, MXD_ERR_ARGUMENT, "frequency_penalty %g is not in -2..2", (double)s->frequency_penalty);
    if (s->logprobs > 1 + MXD_MAX_ALTERNATIVES)
        return mxd_fail(err, MXD_ERR_ARGUMENT, "logprobs %u is not in 0..%d", s->logprobs, 1 + MXD_MAX_ALTERNATIVES);
    return MXD_OK;
}

bool mxd_is_greedy(const mxd_sampling *s) {
    return s->temperature == 0 && s->repeat_penalty == 1 && s->presence_penalty == 0 && s->frequency_penalty == 0;
}

/* Finalize a 64-bit counter-based random number (SplitMix64: Steele, Lea, Flood 2014). */
static uint64_t mix64(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* Return the natural logarithm of u > 0, the same bits everywhere: libm's differ between systems. u = m * 2^e
 * with m in [sqrt(1/2), sqrt(2)); log m = 2 atanh((m-1)/(m+1)) as a series, error below 2^-50. */
static double log_canonical(double u) {
    int e;
    double m = frexp(u, &e);
    if (m < 0x1.6a09e667f3bcdp-1) {
        m *= 2;
        e -= 1;
    }
    double f = (m - 1) / (m + 1), f2 = f * f, term = f, sum = f;
    for (int k = 3; k <= 21; k += 2) {
        term = term * f2;
        sum = sum + term / k;
    }
    return 2 * sum + e * 0x1.62e42fefa39efp-1;
}

/* Return a uniform deviate in (0, 1) on a grid of 2^-53. */
static double uniform(uint64_t seed, uint64_t position, uint32_t id) {
    uint64_t h = mix64(mix64(mix64(seed + 0x9e3779b97f4a7c15u) + position + 1) + id + 1);
    return ((double)(h >> 12) + 0.5) * 0x1p-52;
}

/* Note token `id`; return whether it was noted before. */
static bool noted(uint8_t *seen, uint32_t id) {
    uint8_t bit = (uint8_t)(1u << id % 8), before = seen[id / 8];
    seen[id / 8] = before | bit;
    return before & bit;
}

static void penalize(float penalty, float *logits, mxd_exempt exempt, const uint32_t *prefix, size_t n, uint8_t *seen) {
    for (uint32_t i = 0; i < exempt.count; i++) noted(seen, exempt.ids[i]);
    for (size_t i = 0; i < n; i++) {
        float *x = &logits[prefix[i]];
        if (!noted(seen, prefix[i])) *x = *x > 0 ? *x / penalty : *x * penalty;
    }
    for (uint32_t i = 0; i < exempt.count; i++) seen[exempt.ids[i] / 8] = 0;
    for (size_t i = 0; i < n; i++) seen[prefix[i] / 8] = 0;
}

/* Subtract the penalties for tokens that were generated: for each time, and once for each token. */
static void penalize_generated(const mxd_sampling *s, float *logits, const uint32_t *ids, size_t n, uint8_t *seen) {
    for (size_t i = 0; i < n; i++) {
        float *x = &logits[ids[i]];
        *x = *x - s->frequency_penalty;
        if (!noted(seen, ids[i])) *x = *x - s->presence_penalty;
    }
    for (size_t i = 0; i < n; i++) seen[ids[i] / 8] = 0;
}

static uint32_t argmax(const float *logits, uint32_t vocab) {
    uint32_t best = 0;
    for (uint32_t id = 1; id < vocab; id++)
        if (logits[id] > logits[best]) best = id;
    return best;
}

/* Whether candidate a comes before b: larger weight first, lower id among equals. */
static bool before(const float *w, uint32_t a, uint32_t b) {
    return w[a] > w[b] || (w[a] == w[b] && a < b);
}

static void sift_down(const float *w, uint32_t *heap, size_t n, size_t i) {
    for (size_t child; (child = 2 * i + 1) < n; i = child) {
        if (child + 1 < n && before(w, heap[child + 1], heap[child])) child++;
        if (!before(w, heap[child], heap[i])) return;
        uint32_t t = heap[i];
        heap[i] = heap[child];
        heap[child] = t;
    }
}

/* An exponential race, the same choice as Gumbel-max over the softmax: the candidate with the least noise/weight
 * wins. */
typedef struct race {
    const mxd_sampling *sampling;
    const uint32_t *ids; /* of the candidates, ascending where weights are equal; NULL: each its own */
    uint64_t position;
    uint32_t winner;
    double least;
} race;

static void enter(race *r, uint32_t candidate, float weight) {
    double u = uniform(r->sampling->seed, r->position, r->ids ? r->ids[candidate] : candidate);
    /* -log u >= 1 - u: whoever cannot win by that bound needs no logarithm. */
    if ((1 - u) > r->least * (double)weight) return;
    double time = -log_canonical(u) / (double)weight;
    if (time > r->least || (time == r->least && candidate > r->winner)) return;
    r->least = time;
    r->winner = candidate;
}

uint32_t mxd_sample(const mxd_kernels *kernels, const mxd_sampling *s, float *logits, uint32_t count,
                    const uint32_t *allowed, mxd_exempt exempt, const uint32_t *prefix, size_t n, size_t answer,
                    const mxd_sampler_scratch *scratch) {
    if (s->repeat_penalty != 1) penalize(s->repeat_penalty, logits, exempt, prefix, n, scratch->seen);
    if (s->presence_penalty != 0 || s->frequency_penalty != 0)
        penalize_generated(s, logits, prefix + answer, n - answer, scratch->seen);
    for (uint32_t i = 0; allowed && i < count; i++) logits[i] = logits[allowed[i]]; /* i <= allowed[i] */
    uint32_t chosen = mxd_sample_among(kernels, s, logits, count, allowed, n, scratch);
    return allowed ? allowed[chosen] : chosen;
}

uint32_t mxd_sample_among(const mxd_kernels *kernels, const mxd_sampling *s, const float *logits, uint32_t vocab,
                          const uint32_t *ids, size_t position, const mxd_sampler_scratch *scratch) {
    uint32_t top = argmax(logits, vocab);
    if (s->temperature == 0) return top;

    float *w = scratch->weights;
    kernels->exp_weights(logits, vocab, 1.0f / s->temperature, logits[top], w);
    race r = {.sampling = s, .ids = ids, .position = position, .winner = top, .least = HUGE_VAL};
    float floor = s->min_p * w[top];
    if (s->top_k == 0 && s->top_p == 1) {
        for (uint32_t id = 0; id < vocab; id++)
            if (w[id] >= floor) enter(&r, id, w[id]);
        return r.winner;
    }

    /* Take candidates from a heap in order until top_k or the mass top_p is reached. */
    uint32_t *heap = scratch->heap;
    for (uint32_t id = 0; id < vocab; id++) heap[id] = id;
    for (size_t i = vocab / 2; i-- > 0;) sift_down(w, heap, vocab, i);
    size_t limit = s->top_k && s->top_k < vocab ? s->top_k : vocab, left = vocab;
    double mass = 0;
    if (limit == vocab) {
        for (uint32_t id = 0; id < vocab; id++) mass += (double)w[id];
    } else { /* top_p applies to what top_k left: pop those first; they gather after the shrinking heap */
        for (size_t i = 0; i < limit; i++) {
            uint32_t id = heap[0];
            mass += (double)w[id];
            heap[0] = heap[--left];
            heap[left] = id;
            sift_down(w, heap, left, 0);
        }
    }
    double taken = 0, wanted = (double)s->top_p * mass;
    for (size_t i = 0; i < limit && (i == 0 || taken < wanted); i++) {
        uint32_t id;
        if (limit == vocab) {
            id = heap[0];
            heap[0] = heap[--left];
            sift_down(w, heap, left, 0);
        } else {
            id = heap[vocab - 1 - i];
        }
        taken += (double)w[id];
        if (w[id] >= floor) enter(&r, id, w[id]);
    }
    return r.winner;
}

/* Keep the likeliest tokens in best[count], in their order; ids come ascending. */
static void keep_likely(mxd_alternative *best, uint32_t count, uint32_t token, float logit) {
    if (count == 0 || !(logit > best[count - 1].logprob)) return;
    uint32_t i = count - 1;
    for (; i > 0 && logit > best[i - 1].logprob; i--) best[i] = best[i - 1];
    best[i] = (mxd_alternative){token, logit};
}

void mxd_log_probabilities(const mxd_kernels *kernels, const float *logits, uint32_t vocab, uint32_t token,
                           mxd_alternative *out, uint32_t count, const mxd_sampler_scratch *scratch) {
    out[0] = (mxd_alternative){token, logits[token]};
    for (uint32_t i = 1; i < count; i++) out[i] = (mxd_alternative){UINT32_MAX, -HUGE_VALF};
    for (uint32_t id = 0; id < vocab; id++) keep_likely(out + 1, count - 1, id, logits[id]);
    float top = logits[argmax(logits, vocab)];
    double sum = 0;
    kernels->exp_weights(logits, vocab, 1, top, scratch->weights);
    for (uint32_t id = 0; id < vocab; id++) sum += (double)scratch->weights[id];
    double base = (double)top + log_canonical(sum);
    for (uint32_t i = 0; i < count; i++) out[i].logprob = (float)((double)out[i].logprob - base);
}
